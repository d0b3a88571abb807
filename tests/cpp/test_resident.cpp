// Loading resident weights: every byte in its place from any reader, and what ends a load.
#include "gguf_flash/resident.h"
#include "gguf_flash/round.h"
#include "read_batch.h"

#include <filesystem>

using namespace gguf_flash;

namespace {

constexpr uint64_t file_bytes = 3 * load_staging / 2 + 777; // its reads go round the ring more than once

struct Weights {
    Weights() {
        for (const char * name : { "one", "two" }) {
            files.push_back(open_file(folder.write(name, known_bytes(file_bytes))));
        }
    }

    // A tensor into memory of its own, or lent.
    void add(uint32_t file, uint64_t offset, uint64_t bytes, bool lent = false) {
        memory.emplace_back(lent ? 0 : bytes, uint8_t(0xEE));
        tensors.push_back(
            { "t" + std::to_string(tensors.size()), file, offset, bytes, lent ? nullptr : memory.back().data() });
    }

    // Tensors of all sizes: in sequence with small and large gaps, out of sequence, and in the last byte.
    void add_all() {
        uint64_t at = 33;
        for (uint64_t bytes :
             { uint64_t(1), uint64_t(4095), load_read - 4128, load_read, 3 * load_read + 7, uint64_t(96) }) {
            add(0, at, bytes, bytes % 2 == 0);
            at += bytes + (bytes == 96 ? 0 : bytes % 3 * 40000);
        }
        add(0, at + 500000, 5000);
        add(1, file_bytes - 1, 1);
        add(1, 0, file_bytes - 1);
        add(0, 32, 64, true);
        add(0, 5, 4096);
    }

    Result<bool> load(Reader & reader, size_t stop_after = SIZE_MAX) {
        loaded = 0;
        return read_resident(files, tensors, reader, [&](const Resident & t, const uint8_t * data) {
            CHECK(t.name == tensors[loaded].name);
            bool right = true;
            for (uint64_t i = 0; i < t.bytes; ++i) {
                right = right && data[i] == byte_at(t.offset + i);
            }
            CHECK_MESSAGE(right, t.name);
            return ++loaded < stop_after;
        });
    }

    TempFolder folder;
    std::vector<std::shared_ptr<File>> files;
    std::deque<std::vector<uint8_t>> memory;
    std::vector<Resident> tensors;
    size_t loaded = 0;
};

} // namespace

TEST_CASE("resident: every byte arrives, in order, from every reader") {
    Weights weights;
    weights.add_all();
    for (ReaderKind kind : reader_kinds()) {
        for (const char * plan : { "", "short:2", "reorder:5,again:3", "einval:3" }) {
            CAPTURE(int(kind));
            CAPTURE(std::string(plan));
            const auto reader = open_reader(kind, load_depth, plan);
            const Result<bool> all = weights.load(*reader);
            REQUIRE_MESSAGE(all.ok(), all.status().message());
            CHECK(all.value());
            CHECK(weights.loaded == weights.tensors.size());
        }
    }
}

TEST_CASE("resident: nothing is loaded from no tensors") {
    Weights weights;
    CHECK(weights.load(*open_reader(ReaderKind::pread, 2)).value());
}

TEST_CASE("resident: who is told of a tensor may end the load, reads are over by then") {
    Weights weights;
    weights.add_all();
    for (ReaderKind kind : reader_kinds()) {
        const auto reader = open_reader(kind, load_depth, "delay:300");
        const Result<bool> all = weights.load(*reader, 3);
        REQUIRE(all.ok());
        CHECK_FALSE(all.value());
        CHECK(weights.loaded == 3);
        ReadOp * done[1];
        CHECK(reader->wait(done, 1) == 0);
    }
}

TEST_CASE("resident: a failed read and a file that ends are named with tensor and byte") {
    Weights weights;
    weights.add(0, 100, 3 * load_read);
    weights.add(0, 100 + 3 * load_read, load_read);
    for (ReaderKind kind : reader_kinds()) {
        const Result<bool> all = weights.load(*open_reader(kind, 1, "eio:2"));
        REQUIRE_FALSE(all.ok());
        CHECK(all.status().code() == Code::io);
        CHECK(all.status().message().find("cannot read tensor 't0' at byte " + std::to_string(load_read) + " of '" +
                                          weights.files[0]->label() + "': Input/output error") == 0);
    }
    std::filesystem::resize_file(weights.files[0]->label(), 3 * load_read + 5000);
    for (ReaderKind kind : reader_kinds()) {
        const Result<bool> all = weights.load(*open_reader(kind, load_depth));
        REQUIRE_FALSE(all.ok());
        CHECK(all.status().message().find("cannot read tensor 't1' at byte " + std::to_string(3 * load_read + 5000)) ==
              0);
        CHECK(all.status().message().find("the file ends before it") != std::string::npos);
    }
}
