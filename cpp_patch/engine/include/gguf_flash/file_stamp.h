// Tells whether a file was written to while it is open.
#pragma once

#include <cstdint>

#include <sys/stat.h>

namespace gguf_flash {

// The time is that of the last write: new names, links and permissions leave it alone. A write whose time
// somebody then sets back is not seen.
struct FileStamp {
    uint64_t device = 0, inode = 0, size = 0;
    int64_t seconds = 0, nanoseconds = 0;

    FileStamp() = default;
    explicit FileStamp(const struct stat & info)
        : device(uint64_t(info.st_dev)), inode(uint64_t(info.st_ino)), size(uint64_t(info.st_size)) {
#ifdef __APPLE__
        const timespec & written = info.st_mtimespec;
#else
        const timespec & written = info.st_mtim;
#endif
        seconds = written.tv_sec;
        nanoseconds = written.tv_nsec;
    }

    bool operator==(const FileStamp & o) const {
        return device == o.device && inode == o.inode && size == o.size && seconds == o.seconds &&
               nanoseconds == o.nanoseconds;
    }
};

} // namespace gguf_flash
