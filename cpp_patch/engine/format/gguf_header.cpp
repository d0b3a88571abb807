#include "gguf_header.h"

#include "ggml.h"
#include "gguf_flash/reader.h"
#include "gguf_flash/round.h"
#include "rejection.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include <sys/stat.h>

namespace gguf_flash::format {

namespace {

constexpr uint64_t max_key = 1 << 16;
constexpr uint64_t max_name = 63;          // ggml's limit for tensor names
constexpr uint64_t max_header = 256 << 20; // bytes
constexpr uint64_t max_values = uint64_t(1) << 63;

// Bytes of a scalar gguf type, 0 for string, array and unknown types.
uint64_t scalar_bytes(uint32_t type) {
    static const uint64_t sizes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    return type < 13 ? sizes[type] : 0;
}

double scalar_value(uint32_t type, const unsigned char * p) {
    auto as = [p](auto zero) {
        decltype(zero) v;
        std::memcpy(&v, p, sizeof(v));
        return double(v);
    };
    switch (type) {
        case 0: return as(uint8_t(0));
        case 1: return as(int8_t(0));
        case 2: return as(uint16_t(0));
        case 3: return as(int16_t(0));
        case 4: return as(uint32_t(0));
        case 5: return as(int32_t(0));
        case 6: return as(float(0));
        case 7: return p[0] != 0;
        case 10: return as(uint64_t(0));
        case 11: return as(int64_t(0));
        default: return as(double(0));
    }
}

// Sequential reader that knows the file's size, so that a length field can never ask for more than
// the file holds.
class Cursor {
public:
    Cursor(std::FILE * file, uint64_t size) : file_(file), size_(size) {}

    uint64_t position() const { return position_; }
    uint64_t left() const { return std::min(size_, max_header) - std::min(position_, max_header); }

    bool bytes(void * to, uint64_t n) {
        if (n > left()) {
            return false;
        }
        if (std::fread(to, 1, n, file_) != n) {
            error_ = std::ferror(file_) != 0 ? errno : ENODATA;
            return false;
        }
        position_ += n;
        return true;
    }
    // Why the disk did not give what the file's size promised, 0: it did.
    int error() const { return error_; }
    template <typename T> bool get(T & value) { return bytes(&value, sizeof(T)); }
    bool skip(uint64_t n) {
        if (n > left()) {
            return false;
        }
        if (fseeko(file_, off_t(n), SEEK_CUR) != 0) {
            error_ = errno;
            return false;
        }
        position_ += n;
        return true;
    }
    bool string(std::string & to, uint64_t limit) {
        uint64_t n = 0;
        if (!get(n) || n > left() || n > limit) {
            return false;
        }
        to.resize(n);
        return bytes(&to[0], n);
    }

private:
    std::FILE * file_;
    uint64_t size_;
    uint64_t position_ = 0;
    int error_ = 0;
};

bool read_scalar(Cursor & in, Value & value) {
    unsigned char raw[8];
    const uint64_t n = scalar_bytes(value.type);
    if (n == 0 || !in.bytes(raw, n)) {
        return false;
    }
    value.numbers.push_back(scalar_value(value.type, raw));
    return true;
}

bool read_array(Cursor & in, Value & value, bool keep) {
    if (!in.get(value.array_type) || !in.get(value.count)) {
        return false;
    }
    const uint64_t n = scalar_bytes(value.array_type);
    keep = keep && (n == 0 || value.array_type == value_u32 || value.array_type == value_f32);
    if (n == 0 && value.array_type != value_string) {
        return false; // an array of arrays, or an unknown type
    }
    if (value.count > in.left() / std::max<uint64_t>(n, n == 0 ? 8 : 1)) {
        return false;
    }
    if (n != 0 && !keep) {
        return in.skip(n * value.count);
    }
    std::string item;
    unsigned char raw[8];
    for (uint64_t i = 0; i < value.count; ++i) {
        if (n != 0) {
            if (!in.bytes(raw, n)) {
                return false;
            }
            value.numbers.push_back(scalar_value(value.array_type, raw));
        } else if (keep) {
            if (!in.string(item, max_header)) {
                return false;
            }
            value.strings.push_back(item);
        } else {
            uint64_t length = 0;
            if (!in.get(length) || !in.skip(length)) {
                return false;
            }
        }
    }
    return true;
}

bool read_value(Cursor & in, Value & value, bool keep) {
    if (!in.get(value.type)) {
        return false;
    }
    if (value.type == value_array) {
        return read_array(in, value, keep);
    }
    if (value.type != value_string) {
        return read_scalar(in, value);
    }
    uint64_t length = 0;
    if (!in.get(length) || length > in.left()) {
        return false;
    }
    if (!keep) {
        return in.skip(length);
    }
    value.strings.emplace_back(length, '\0');
    return in.bytes(&value.strings.back()[0], length);
}

// Values the engine reads. A tokenizer's arrays and chat templates are skipped unread.
bool keep(const std::string & key) {
    return (key.rfind("flash_ffn.", 0) == 0 && key != "flash_ffn.pad") || key == "general.architecture";
}

// Bytes of a tensor, UINT64_MAX if they are more; false when its type is unknown, a row is not whole blocks,
// or it has too many values.
bool tensor_bytes(const TensorInfo & info, uint64_t & bytes) {
    if (info.type >= GGML_TYPE_COUNT || ggml_blck_size(ggml_type(info.type)) <= 0 ||
        ggml_type_size(ggml_type(info.type)) == 0) {
        return false;
    }
    uint64_t values = 1;
    for (uint64_t n : info.ne) {
        if (__builtin_mul_overflow(values, n, &values) || values >= max_values) {
            return false;
        }
    }
    const uint64_t block = uint64_t(ggml_blck_size(ggml_type(info.type)));
    if ((info.ne.empty() ? 1 : info.ne[0]) % block != 0) {
        return false;
    }
    if (__builtin_mul_overflow(values / block, uint64_t(ggml_type_size(ggml_type(info.type))), &bytes)) {
        bytes = UINT64_MAX;
    }
    return true;
}

bool read_tensor_info(Cursor & in, TensorInfo & info) {
    uint32_t n_dims = 0;
    if (!in.string(info.name, max_name) || info.name.empty() || !in.get(n_dims) || n_dims > 4) {
        return false;
    }
    info.ne.resize(n_dims);
    for (uint64_t & n : info.ne) {
        if (!in.get(n)) {
            return false;
        }
    }
    return in.get(info.type) && in.get(info.offset);
}

class HeaderReader {
public:
    HeaderReader(Cursor in, std::string label, uint64_t size) : in_(in), label_(std::move(label)) {
        header_.file_size = size;
    }

    Result<Header> run() {
        for (auto step :
             { &HeaderReader::start, &HeaderReader::keys, &HeaderReader::tensors, &HeaderReader::alignment }) {
            Status status = (this->*step)();
            if (in_.error() != 0) { // whatever the step made of it
                return Status(Code::io, "cannot read '" + label_ + "' at byte " + std::to_string(in_.position()) +
                                            " of " + std::to_string(header_.file_size) + ": " +
                                            read_error(in_.error()));
            }
            if (!status.ok()) {
                return status;
            }
        }
        return std::move(header_);
    }

private:
    Status corrupt(const std::string & what, int rule) const { return reject(Code::corrupt, label_, what, rule); }
    Status truncated(const std::string & where) const {
        return corrupt("the header ends, or has an unknown type or an impossible length or shape, in " + where +
                           " at byte " + std::to_string(in_.position()) + " of " + std::to_string(header_.file_size) +
                           "; the file is truncated or damaged, copy or convert it again",
                       3);
    }

    Status start() {
        char magic[4] = {};
        uint32_t version = 0;
        if (!in_.get(magic) || std::memcmp(magic, "GGUF", 4) != 0) {
            return reject(Code::not_flash, label_,
                          "it is not a GGUF file: it does not start with the bytes 'GGUF'; give a file made by "
                          "gguf-flash convert",
                          1);
        }
        if (!in_.get(version)) {
            return truncated("the version");
        }
        if (version != 3) {
            return reject(Code::version, label_,
                          "GGUF version 3 expected, found " + std::to_string(version) + "; convert the model again", 2);
        }
        if (!in_.get(n_tensors_) || !in_.get(n_keys_)) {
            return truncated("the counts");
        }
        // A key takes 13 bytes at least and a tensor info 24.
        if (n_keys_ > in_.left() / 13 || n_tensors_ > (in_.left() - 13 * n_keys_) / 24) {
            return truncated("the counts (" + std::to_string(n_tensors_) + " tensors, " + std::to_string(n_keys_) +
                             " keys)");
        }
        return {};
    }

    Status keys() {
        for (uint64_t i = 0; i < n_keys_; ++i) {
            std::string key;
            Value value;
            const bool named = in_.string(key, max_key) && !key.empty();
            if (named && header_.keys.count(key) != 0) {
                return corrupt("key '" + key + "' appears twice; convert the model again", 20);
            }
            if (!named || !read_value(in_, value, keep(key))) {
                return truncated("key " + std::to_string(i) + " '" + key.substr(0, 80) + "'");
            }
            header_.keys.emplace(std::move(key), std::move(value));
        }
        return {};
    }

    Status tensors() {
        std::set<std::string> names;
        for (uint64_t i = 0; i < n_tensors_; ++i) { // grows with what is there: the count may be a lie
            TensorInfo info;
            if (!read_tensor_info(in_, info) || !tensor_bytes(info, info.bytes)) {
                return truncated("tensor info '" + info.name.substr(0, 80) + "'");
            }
            if (!names.insert(info.name).second) {
                return corrupt("tensor '" + info.name + "' appears twice; convert the model again", 20);
            }
            header_.tensors.push_back(std::move(info));
        }
        return {};
    }

    // The alignment, the start of the data section, and offsets from the start of the file.
    Status alignment() {
        if (const Value * value = header_.find("general.alignment")) {
            header_.alignment = value->is(value_u32) ? uint64_t(value->numbers[0]) : 0;
        }
        const uint64_t a = header_.alignment;
        if (a == 0 || (a & (a - 1)) != 0) {
            return corrupt("general.alignment is not a u32 power of two; convert the model again", 16);
        }
        header_.data_offset = round_up(in_.position(), a);
        for (TensorInfo & info : header_.tensors) {
            info.aligned = info.offset % a == 0;
            if (__builtin_add_overflow(info.offset, header_.data_offset, &info.offset)) {
                info.offset = UINT64_MAX;
            }
        }
        return {};
    }

    Cursor in_;
    std::string label_;
    uint64_t n_tensors_ = 0;
    uint64_t n_keys_ = 0;
    Header header_;
};

} // namespace

const Value * Header::find(const std::string & key) const {
    auto it = keys.find(key);
    return it == keys.end() ? nullptr : &it->second;
}

Result<Header> read_header(const std::string & path, const std::string & label) {
    struct stat about;
    if (stat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode)) { // opening a pipe would wait for its writer
        return Status(Code::io, "cannot open '" + label + "': it is " +
                                    (S_ISDIR(about.st_mode) ? "a directory" : "a device or a pipe") + ", give a file");
    }
    std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
    if (!file) {
        return Status(Code::io, "cannot open '" + label + "': " + std::strerror(errno));
    }
    if (fstat(fileno(file.get()), &about) != 0) {
        return Status(Code::io, "cannot read the size of '" + label + "': " + std::strerror(errno));
    }
    const FileStamp stamp(about);
    Result<Header> header = HeaderReader(Cursor(file.get(), stamp.size), label, stamp.size).run();
    if (header.ok()) {
        header.value().stamp = stamp;
    }
    return header;
}

Status check_places(const Header & header, const std::string & label) {
    std::vector<const TensorInfo *> order;
    for (const TensorInfo & info : header.tensors) {
        if (!info.aligned) {
            return reject(Code::corrupt, label,
                          "tensor '" + info.name + "' does not start at a multiple of " +
                              std::to_string(header.alignment) + "; convert the model again",
                          16);
        }
        uint64_t end = UINT64_MAX;
        if (__builtin_add_overflow(info.offset, info.bytes, &end) || end > header.file_size) {
            return reject(Code::corrupt, label,
                          "tensor '" + info.name + "' ends beyond the file's " + std::to_string(header.file_size) +
                              " bytes; it is truncated, copy or convert it again",
                          15);
        }
        if (info.bytes > 0) {
            order.push_back(&info);
        }
    }
    std::sort(order.begin(), order.end(),
              [](const TensorInfo * a, const TensorInfo * b) { return a->offset < b->offset; });
    for (size_t i = 1; i < order.size(); ++i) {
        if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset) {
            return reject(
                Code::corrupt, label,
                "tensor '" + order[i - 1]->name + "' overlaps '" + order[i]->name + "'; convert the model again", 16);
        }
    }
    return {};
}

} // namespace gguf_flash::format
