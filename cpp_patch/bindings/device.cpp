// What the device and the memory under this process give, measured with the engine's own readers.
#include "bindings.h"

#include "gguf_flash/reader.h"
#include "gguf_flash/round.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include <fcntl.h>

namespace py = pybind11;

namespace gguf_flash {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct FreeBytes {
    void operator()(void * p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t, FreeBytes>;

Bytes aligned_bytes(size_t align, size_t bytes) {
    void * p = nullptr;
    if (posix_memalign(&p, std::max<size_t>(align, 4096), bytes) != 0) {
        throw std::bad_alloc();
    }
    return Bytes(static_cast<uint8_t *>(p));
}

struct Plan {
    std::string reader;
    bool direct = true, sequential = false;
    uint64_t size = 0;
    int depth = 0;
    double seconds = 0;
    uint64_t seed = 0;
};

// One slot of memory and one read for each place in the queue.
struct Queue {
    Queue(const File & file, const Plan & plan)
        : memory(aligned_bytes(file.align(), plan.size * uint64_t(plan.depth))), ops(size_t(plan.depth)),
          segments(size_t(plan.depth)), random(plan.seed), places(file.size() / plan.size) {
        for (size_t i = 0; i < ops.size(); ++i) {
            ops[i].tag = uint32_t(i);
        }
    }

    ReadOp * next(const File & file, const Plan & plan, uint32_t slot) {
        segments[slot] = { memory.get() + slot * plan.size, plan.size };
        ReadOp & op = ops[slot];
        op = ReadOp();
        op.file = &file;
        const uint64_t place = plan.sequential ? started % places : random() % places;
        op.offset = place * plan.size;
        op.needed = plan.size;
        op.n_segments = 1;
        op.segments = &segments[slot];
        op.tag = slot;
        ++started;
        return &op;
    }

    Bytes memory;
    std::vector<ReadOp> ops;
    std::vector<iovec> segments;
    std::mt19937_64 random;
    uint64_t places, started = 0;
};

// Keeps the queue full for plan.seconds and counts what comes back, then empties it.
Status drive(Reader & reader, const std::shared_ptr<File> & shared, const Plan & plan, uint64_t & reads,
             double & seconds) {
    const File & file = *shared;
    Queue queue(file, plan);
    reader.enlist({ shared }, { { queue.memory.get(), plan.size * uint64_t(plan.depth) } });
    std::vector<ReadOp *> done(queue.ops.size());
    const Clock::time_point begin = Clock::now();
    for (uint32_t slot = 0; slot < queue.ops.size(); ++slot) {
        reader.submit(queue.next(file, plan, slot));
    }
    Status status;
    size_t in_flight = queue.ops.size();
    while (in_flight > 0) {
        const size_t n = reader.wait(done.data(), done.size());
        for (size_t i = 0; i < n; ++i) {
            reads += done[i]->error == 0;
            if (done[i]->error != 0 && status.ok()) {
                status = { Code::io, "cannot read '" + file.label() + "': " + read_error(done[i]->error) };
            }
            if (status.ok() && seconds_since(begin) < plan.seconds) {
                reader.submit(queue.next(file, plan, done[i]->tag));
            } else {
                --in_flight;
            }
        }
        reader.flush();
    }
    seconds = seconds_since(begin);
    return status;
}

Status check(const File & file, const Plan & plan) {
    if (plan.size == 0 || plan.size % file.align() != 0 || plan.size > (uint64_t(1) << 30)) {
        return { Code::argument, "a read size that is a multiple of " + std::to_string(file.align()) +
                                     " up to 1 GiB expected, found " + std::to_string(plan.size) +
                                     "; give --sizes such as 4KiB,64KiB" };
    }
    if (file.size() < plan.size) {
        return { Code::argument, "'" + file.label() + "' has " + std::to_string(file.size()) +
                                     " bytes, less than one read of " + std::to_string(plan.size) };
    }
    return {};
}

py::dict measure_reads(const std::string & path, const std::string & reader, bool direct, bool sequential,
                       uint64_t size, int depth, double seconds, uint64_t seed) {
    Plan plan;
    plan.reader = reader;
    plan.direct = direct;
    plan.sequential = sequential;
    plan.size = size;
    plan.depth = depth;
    plan.seconds = seconds;
    plan.seed = seed;
    const std::shared_ptr<File> file = value_or_raise(File::open(path, path));
#ifdef O_DIRECT
    if (!direct && file->direct()) {
        fcntl(file->fd(), F_SETFL, fcntl(file->fd(), F_GETFL) & ~O_DIRECT);
    }
#endif
    raise_if_failed(check(*file, plan));
    const std::unique_ptr<Reader> made =
        value_or_raise(make_reader(value_or_raise(parse_reader(reader)), depth, nullptr));
    uint64_t reads = 0;
    double took = 0;
    Status status;
    {
        py::gil_scoped_release release;
        status = drive(*made, file, plan, reads, took);
    }
    raise_if_failed(status);
    py::dict d;
    d["reader"] = made->name();
    d["direct"] = direct && file->direct();
    d["reads"] = reads;
    d["bytes"] = reads * size;
    d["seconds"] = took;
    return d;
}

// What one thread of memory_bandwidth reads, and how often it has.
struct Lane {
    std::vector<uint64_t> words;
    uint64_t passes = 0, sum = 0;
};

// Sums a buffer larger than any cache again and again; the sum is kept, so that the loop is.
uint64_t sum_words(const uint64_t * words, size_t n) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i + 8 <= n; i += 8) {
        for (size_t j = 0; j < 8; ++j) {
            sums[j] += words[i + j];
        }
    }
    uint64_t all = 0;
    for (uint64_t s : sums) {
        all += s;
    }
    return all;
}

// Every lane is read by a thread of its own until `seconds` have passed. What was started is joined, whatever
// the system refuses.
Status read_lanes(std::vector<Lane> & lanes, Clock::time_point begin, double seconds) {
    Status status;
    std::vector<std::thread> pool;
    std::atomic<bool> stop{ false };
    try {
        pool.reserve(lanes.size());
        for (Lane & lane : lanes) {
            pool.emplace_back([&lane, &stop, begin, seconds] {
                do {
                    lane.sum += sum_words(lane.words.data(), lane.words.size());
                    ++lane.passes;
                } while (!stop && seconds_since(begin) < seconds);
            });
        }
    } catch (const std::exception & error) {
        stop = true;
        status = { Code::io, "cannot start thread " + std::to_string(pool.size() + 1) + " of " +
                                 std::to_string(lanes.size()) + " to measure the memory: " + error.what() +
                                 "; give fewer --threads" };
    }
    for (std::thread & t : pool) {
        t.join();
    }
    return status;
}

double memory_bandwidth(int threads, uint64_t bytes, double seconds) {
    if (threads < 1 || threads > 1024 || bytes < 4096) {
        const std::string found = std::to_string(threads) + " and " + std::to_string(bytes);
        raise_if_failed({ Code::argument, "1 to 1024 threads and at least 4096 bytes expected to measure the memory, "
                                          "found " +
                                              found + "; give --threads such as 4" });
    }
    std::vector<Lane> lanes(static_cast<size_t>(threads));
    uint64_t read = 0;
    double took = 0;
    Status status;
    {
        py::gil_scoped_release release;
        for (Lane & lane : lanes) {
            lane.words.assign(size_t(bytes) / lanes.size() / sizeof(uint64_t), 1);
        }
        const Clock::time_point begin = Clock::now();
        status = read_lanes(lanes, begin, seconds);
        took = seconds_since(begin);
    }
    raise_if_failed(status);
    for (const Lane & lane : lanes) {
        read += lane.sum == 0 ? 0 : lane.passes * lane.words.size() * sizeof(uint64_t);
    }
    return double(read) / took;
}

} // namespace

void init_device(py::module_ & m) {
    m.def("measure_reads", &measure_reads, py::arg("path"), py::arg("reader"), py::arg("direct"), py::arg("sequential"),
          py::arg("size"), py::arg("depth"), py::arg("seconds"), py::arg("seed") = 0,
          "Reads pieces of size bytes at random places of a file, or one after the other, depth of them in flight, for "
          "some seconds, with the engine's reader. Keys: reader, direct, reads, bytes, seconds.");
    m.def("memory_bandwidth", &memory_bandwidth, py::arg("threads"), py::arg("bytes"), py::arg("seconds"),
          "Bytes a second that so many threads together read from a buffer of that many bytes.");
}

} // namespace gguf_flash
