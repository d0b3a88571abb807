// Damaged headers: never a crash or a hang, always a layout or a message.
#include "flash_file.h"
#include "temp_folder.h"

#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

using namespace gguf_flash;

namespace {

// A file that is damaged and repaired in place: writing 20,000 files would be the whole test.
class Patient {
public:
    Patient(const TempFolder & folder, Bytes bytes)
        : path(folder.write("fuzz.gguf", bytes)), bytes_(std::move(bytes)), fd_(open(path.c_str(), O_RDWR)) {}
    ~Patient() { close(fd_); }

    void damage(size_t at, const Bytes & with) {
        REQUIRE(pwrite(fd_, with.data(), with.size(), off_t(at)) == ssize_t(with.size()));
        low_ = std::min(low_, at);
        high_ = std::max(high_, at + with.size());
    }
    void cut(size_t size) {
        REQUIRE(ftruncate(fd_, off_t(size)) == 0);
        low_ = std::min(low_, size);
        high_ = bytes_.size();
    }
    void repair() {
        REQUIRE(ftruncate(fd_, off_t(bytes_.size())) == 0);
        if (high_ > low_) {
            REQUIRE(pwrite(fd_, bytes_.data() + low_, high_ - low_, off_t(low_)) == ssize_t(high_ - low_));
        }
        low_ = SIZE_MAX;
        high_ = 0;
    }

    const std::string path;

private:
    Bytes bytes_;
    int fd_;
    size_t low_ = SIZE_MAX, high_ = 0;
};

// Returns whether the file was still accepted; whatever was accepted must lie inside it.
bool read_once(const Patient & patient, size_t file_size) {
    const Result<Layout> layout = read_layout({ patient.path }, "fuzz");
    if (!layout.ok()) {
        REQUIRE_FALSE(layout.status().message().empty());
        return false;
    }
    for (const LayerLayout & layer : layout.value().layers) {
        REQUIRE(layer.offset + layer.stride * layer.n_ff <= file_size);
        REQUIRE(layer.parts.back().offset + layer.parts.back().bytes <= layer.stride);
        REQUIRE((layer.rank > 0) == (layout.value().select == Select::predictor));
        REQUIRE((layer.predictor_threshold >= 0 && layer.predictor_threshold < 1));
    }
    return true;
}

void fuzz(const FlashFile & file, int rounds, uint64_t seed) {
    TempFolder folder;
    const Bytes bytes = file.image.bytes();
    const size_t header = file.image.header().size();
    Patient patient(folder, bytes);
    Random random(seed);
    int accepted = 0;
    REQUIRE(read_once(patient, bytes.size()));
    for (int i = 0; i < rounds; ++i) {
        size_t size = bytes.size();
        if (random.chance(10)) {
            size = random.below(uint32_t(random.chance(50) ? header : bytes.size()));
            patient.cut(size);
        }
        for (uint32_t n = random.below(4); n > 0 || size == bytes.size(); --n) {
            const size_t at = random.below(uint32_t(header - 8));
            Bytes with(random.chance(70) ? 1 : 8);
            for (uint8_t & b : with) {
                b = random.chance(30) ? uint8_t(random.pick<int>({ 0, 1, 0x7f, 0x80, 0xff })) : uint8_t(random.bits());
            }
            if (at + with.size() <= size) {
                patient.damage(at, with);
            }
            if (n == 0) {
                break;
            }
        }
        accepted += read_once(patient, size);
        patient.repair();
    }
    CHECK(read_once(patient, bytes.size()));
    CHECK(accepted < rounds);
}

} // namespace

TEST_CASE("header fuzz: 20,000 damaged headers") {
    FlashSpec spec;
    spec.n_ff = { 70 };
    spec.align = 32;
    spec.biases = true;
    spec.layers = { 0, 3 };
    spec.thresholds = { 0.5f, 0 };
    spec.pad_header = false; // else most damage would hit the padding
    fuzz(FlashFile(spec), 12000, 1);
    spec.select = Select::gate;
    spec.thresholds = {};
    fuzz(FlashFile(spec), 8000, 2);
}

TEST_CASE("header fuzz: 8,000 damaged headers with predictors and calibration") {
    FlashSpec spec;
    spec.n_ff = { 70 };
    spec.align = 32;
    spec.layers = { 0, 3 };
    spec.select = Select::predictor;
    spec.predictor.b = GGML_TYPE_Q8_0;
    spec.predictor.capacities = { 64, 70 };
    spec.pad_header = false;
    fuzz(FlashFile(spec), 8000, 3);
}

TEST_CASE("header fuzz: every byte of a small header, three values each") {
    FlashSpec spec;
    spec.n_ff = { 4 };
    spec.align = 32;
    spec.pad_header = false;
    for (Select select : { Select::all, Select::predictor }) {
        spec.select = select;
        const FlashFile file(spec);
        TempFolder folder;
        const Bytes bytes = file.image.bytes();
        Patient patient(folder, bytes);
        for (size_t at = 0; at < file.image.header().size(); ++at) {
            for (uint8_t value : { uint8_t(0), uint8_t(0xff), uint8_t(bytes[at] ^ 0x80) }) {
                patient.damage(at, { value });
                read_once(patient, bytes.size());
                patient.repair();
            }
        }
    }
}
