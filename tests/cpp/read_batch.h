// Reads under test: a file whose every byte is known, operations with their memory, and the check.
#pragma once

#include "gguf_flash/reader.h"
#include "random_data.h"
#include "temp_folder.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <memory>

inline uint8_t byte_at(uint64_t offset) {
    return uint8_t((offset * 0x9E3779B97F4A7C15ull) >> 56);
}

inline std::vector<uint8_t> known_bytes(uint64_t size) {
    std::vector<uint8_t> out(size);
    for (uint64_t i = 0; i < size; ++i) {
        out[i] = byte_at(i);
    }
    return out;
}

struct FreeMemory {
    void operator()(uint8_t * p) const { free(p); }
};

// Operations stay in place, as the contract wants.
class ReadBatch {
public:
    explicit ReadBatch(const gguf_flash::File & file) : file_(file) {}

    // One read of needed bytes at offset (a multiple of align) into n_segments pieces of memory.
    gguf_flash::ReadOp * add(uint64_t offset, uint64_t needed, int n_segments) {
        items_.emplace_back();
        Item & item = items_.back();
        const uint64_t unit = std::max<uint64_t>(file_.align(), 512);
        const uint64_t each = (needed / uint64_t(n_segments) / unit + 1) * unit;
        item.memory.resize(size_t(n_segments));
        item.segments.resize(size_t(n_segments));
        for (int i = 0; i < n_segments; ++i) {
            item.memory[size_t(i)].reset(static_cast<uint8_t *>(aligned_alloc(4096, (each + 4095) / 4096 * 4096)));
            std::fill_n(item.memory[size_t(i)].get(), each, uint8_t(0xEE));
            item.segments[size_t(i)] = { item.memory[size_t(i)].get(), size_t(each) };
        }
        item.each = each;
        item.op.file = &file_;
        item.op.offset = offset;
        item.op.needed = needed;
        item.op.n_segments = n_segments;
        item.op.segments = item.segments.data();
        item.op.tag = uint32_t(items_.size() - 1);
        return &item.op;
    }

    void add_random(Random & random, int count, uint64_t max_bytes, int max_segments) {
        const uint64_t align = file_.align();
        for (int i = 0; i < count; ++i) {
            const uint64_t offset = random.bits() % file_.size() / align * align;
            const uint64_t most = std::min(max_bytes, file_.size() - offset);
            add(offset, 1 + random.bits() % most, 1 + int(random.below(uint32_t(max_segments))));
        }
    }

    size_t size() const { return items_.size(); }
    gguf_flash::ReadOp & op(size_t i) { return items_[i].op; }
    int times_done(size_t i) const { return items_[i].done; }

    void submit(gguf_flash::Reader & reader) {
        for (Item & item : items_) {
            reader.submit(&item.op);
        }
    }

    // Takes results in bites of random size until all have come.
    void collect(gguf_flash::Reader & reader, Random & random) {
        gguf_flash::ReadOp * done[8];
        size_t left = items_.size();
        while (left > 0) {
            const size_t max = 1 + random.below(8);
            const bool block = random.chance(70);
            const size_t n = block ? reader.wait(done, max) : reader.poll(done, max);
            REQUIRE(n <= max);
            REQUIRE_FALSE((block && n == 0));
            for (size_t i = 0; i < n; ++i) {
                ++items_[done[i]->tag].done;
            }
            left -= n;
        }
        CHECK(reader.wait(done, 8) == 0);
    }

    // Whether every needed byte of operation i is what the file holds.
    bool right(size_t i) const {
        const Item & item = items_[i];
        for (uint64_t b = 0; b < item.op.needed; ++b) {
            if (item.memory[b / item.each].get()[b % item.each] != byte_at(item.op.offset + b)) {
                return false;
            }
        }
        return true;
    }

    void check_all_right() {
        for (size_t i = 0; i < items_.size(); ++i) {
            CAPTURE(i);
            CHECK(items_[i].op.error == 0);
            CHECK(items_[i].done == 1);
            CHECK(right(i));
        }
    }

private:
    struct Item {
        gguf_flash::ReadOp op;
        std::vector<iovec> segments;
        std::vector<std::unique_ptr<uint8_t, FreeMemory>> memory;
        uint64_t each = 0; // bytes of a segment
        int done = 0;
    };

    const gguf_flash::File & file_;
    std::deque<Item> items_;
};

// The readers this machine has; every conformance test runs for each of them.
inline std::vector<gguf_flash::ReaderKind> reader_kinds() {
    std::vector<gguf_flash::ReaderKind> kinds = { gguf_flash::ReaderKind::pread };
    if (gguf_flash::io_uring_problem().empty()) {
        kinds.push_back(gguf_flash::ReaderKind::io_uring);
    } else {
        MESSAGE(gguf_flash::io_uring_problem());
    }
    return kinds;
}

inline std::unique_ptr<gguf_flash::Reader> open_reader(gguf_flash::ReaderKind kind, int depth,
                                                       const std::string & faults = "") {
    auto plan = gguf_flash::FaultPlan::parse(faults);
    REQUIRE(plan.ok());
    auto reader = gguf_flash::make_reader(kind, depth, faults.empty() ? nullptr : plan.value());
    REQUIRE_MESSAGE(reader.ok(), reader.status().message());
    return std::move(reader.value());
}

inline std::shared_ptr<gguf_flash::File> open_file(const std::string & path) {
    auto file = gguf_flash::File::open(path, path);
    REQUIRE_MESSAGE(file.ok(), file.status().message());
    return file.value();
}

// Runs body for every reader and depth.
template <typename Body> void for_each_reader(const Body & body) {
    for (gguf_flash::ReaderKind kind : reader_kinds()) {
        for (int depth : { 1, 4, 32 }) {
            CAPTURE(int(kind));
            CAPTURE(depth);
            body(kind, depth);
        }
    }
}
