// The one door to the disk: positional asynchronous reads into memory the caller owns.
//
// A Reader belongs to one thread at a time. Operations complete in any order. Short reads, EINTR and
// EAGAIN are handled inside; what the caller sees is either all the bytes it needs or an error.
#pragma once

#include "gguf_flash/file_stamp.h"
#include "gguf_flash/status.h"

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gguf_flash {

// A file opened for reading, without the page cache (O_DIRECT) where the file system allows it.
class File {
public:
    // label names the file in messages when path is not what the user wrote.
    static Result<std::shared_ptr<File>> open(const std::string & path, const std::string & label);
    ~File();
    File(const File &) = delete;
    File & operator=(const File &) = delete;

    int fd() const { return fd_; }
    bool direct() const { return direct_; }
    // Offsets, lengths and addresses of reads must be multiples of this; 1 when buffered from the start.
    uint64_t align() const { return align_; }
    // From now on reads go through the page cache: the file system refused one without, as some do only
    // for some reads. Any thread may call it; reads under way are not disturbed.
    void read_buffered() const;
    uint64_t size() const { return size_; }
    // Code::io if the file is no longer what the stamp says.
    Status check(const FileStamp & stamp) const;
    const std::string & label() const { return label_; }

private:
    File() = default;
    int fd_ = -1;
    mutable std::atomic<bool> direct_{ false };
    uint64_t align_ = 1;
    uint64_t size_ = 0;
    std::string label_;
};

constexpr int max_segments = 64; // pieces of memory one read may fill; far below IOV_MAX

// One read. The caller fills the first block and keeps the object, its segments and their memory alive
// and in place until it is reported done; the reader owns the rest and uses the segments up.
struct ReadOp {
    const File * file = nullptr;
    uint64_t offset = 0; // bytes, a multiple of file->align()
    uint64_t needed = 0; // bytes from offset that must arrive; the segments may reach past the end of the file
    int n_segments = 0;
    iovec * segments = nullptr;
    void * trash = nullptr; // segments that begin here are read through: a reader may put them elsewhere
    uint32_t tag = 0;       // these two for the caller
    void * owner = nullptr;

    int error = 0; // errno once done; 0 is success, ENODATA the end of the file
    uint64_t got = 0;
    int first = 0; // first segment not yet full
    ReadOp * next = nullptr;
    int fruitless = 0;    // EAGAIN in a row, the first of them at unready
    bool refused = false; // EINVAL already sent it to the page cache once
    std::chrono::steady_clock::time_point unready;
};

// Makes reads fail on purpose, beneath the retry logic of every reader. For tests. A plan is a list such as
// "eio:100,short:3" of these; reads are counted from 1, and one that is begun again counts again:
//   eio:N          the Nth gives EIO, once
//   einval:N       the Nth gives EINVAL, once, as of a file system that refuses a direct read
//   vanish:N[-M]   all from the Nth on, up to the Mth, give ENODEV: a device that goes, and comes back
//   short:N        every Nth comes back short
//   again:N        every Nth gives EAGAIN first; again:1 never anything else
//   delay:N        each takes N microseconds more
//   stall:N        the Nth takes three seconds more
//   reorder:N      results are held back until N are there, and come last first
//   uring:EPERM    io_uring is denied, as by a sandbox; uring:ENOSYS as by an old kernel
class FaultPlan {
public:
    static Result<std::shared_ptr<FaultPlan>> parse(const std::string & text);
    // What the operating system "returned": a byte count or a negative errno, perhaps made worse.
    int64_t apply(int64_t result, uint64_t align);

    size_t reorder() const { return size_t(reorder_); } // 0: as they come
    int uring_error() const { return uring_error_; }    // errno of io_uring_setup, 0: none

private:
    bool set(const std::string & name, const std::string & value);
    bool set_number(const std::string & name, const std::string & value);

    uint64_t eio_ = 0, einval_ = 0, short_ = 0, again_ = 0, delay_us_ = 0, stall_ = 0, reorder_ = 0;
    uint64_t vanish_ = 0, back_ = UINT64_MAX; // first and last read without a device
    int uring_error_ = 0;
    std::atomic<uint64_t> count_{ 0 }; // readers of several contexts share a plan
};

class Reader {
public:
    virtual ~Reader() = default;
    virtual const char * name() const = 0;
    // Files that will be read and memory that will be read into, alive as long as the reader: what lies
    // in them may take a shorter way. Pins the memory, and lets go what was enlisted before. Call it with
    // nothing in flight. Memory that is given back to the system or moved must not stay enlisted.
    virtual void enlist(const std::vector<std::shared_ptr<File>> &, const std::vector<iovec> &) {}
    // Queues an operation; at most depth are with the device at once, the rest wait inside. Neither this nor
    // what follows asks for memory: errors are handled where there is none.
    virtual void submit(ReadOp * op) = 0;
    // Hands queued operations to the device. Called by poll and wait too.
    virtual void flush() = 0;
    // Takes finished operations, at most max; wait() blocks until there is one unless none is queued.
    virtual size_t poll(ReadOp ** done, size_t max) = 0;
    virtual size_t wait(ReadOp ** done, size_t max) = 0;
};

// Reads in flight, where nobody says how many. In a ring nearly the 256 requests that Linux has for a disk,
// beyond which submitting blocks; fewer, and those that wait inside are overtaken by what is read ahead. In
// a pool a thread each.
constexpr int ring_depth = 224, pool_depth = 32;

// Reads in flight by io_uring and by pread, for who does not know which it will be.
struct Depth {
    Depth(int both) : ring(both), pool(both) {}
    Depth(int in_ring, int in_pool) : ring(in_ring), pool(in_pool) {}
    int ring, pool;
};

enum class ReaderKind { automatic, io_uring, pread };
Result<ReaderKind> parse_reader(const std::string & name); // "auto", "io_uring", "pread"

// faults may be null. automatic takes io_uring where the kernel allows it, else the pread pool.
Result<std::unique_ptr<Reader>> make_reader(ReaderKind kind, Depth depth, std::shared_ptr<FaultPlan> faults);

// Empty if io_uring works in this process, else why not.
std::string io_uring_problem();

// What a ReadOp's error means, for a message.
std::string read_error(int error);

// Advances op by n bytes; true when it is complete. Shared by the readers.
bool advance(ReadOp & op, uint64_t n);

} // namespace gguf_flash
