#include "gguf_flash/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace gguf_flash {

namespace {

// What direct reads of this file must be aligned to, or 0 when it has no direct I/O.
uint64_t direct_alignment(int fd) {
#ifdef STATX_DIOALIGN
    struct statx info;
    std::memset(&info, 0, sizeof(info));
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
        return std::max(info.stx_dio_offset_align, info.stx_dio_mem_align);
    }
#endif
    return 4096; // kernels before 6.1 do not say; every device accepts its page size
}

// Some file systems take O_DIRECT and then refuse every read.
bool direct_reads_work(int fd, uint64_t align) {
    void * block = nullptr;
    if (align == 0 || (align & (align - 1)) != 0 || posix_memalign(&block, std::max<size_t>(align, 4096), align) != 0) {
        return false;
    }
    const bool refused = pread(fd, block, align, 0) < 0 && (errno == EINVAL || errno == EOPNOTSUPP);
    std::free(block);
    return !refused;
}

} // namespace

Result<std::shared_ptr<File>> File::open(const std::string & path, const std::string & label) {
    std::shared_ptr<File> file(new File());
    file->label_ = label;
    int flags = O_RDONLY | O_CLOEXEC;
#ifdef O_DIRECT
    file->fd_ = ::open(path.c_str(), flags | O_DIRECT);
    file->direct_ = file->fd_ >= 0;
#endif
    if (file->fd_ < 0) {
        file->fd_ = ::open(path.c_str(), flags);
    }
    if (file->fd_ < 0) {
        return Status(Code::io, "cannot open '" + label + "': " + std::strerror(errno));
    }
#ifdef F_NOCACHE
    file->direct_ = fcntl(file->fd_, F_NOCACHE, 1) == 0;
    file->align_ = 1;
#endif
#ifdef O_DIRECT
    if (file->direct_) {
        file->align_ = direct_alignment(file->fd_);
        if (!direct_reads_work(file->fd_, file->align_)) {
            file->read_buffered();
            file->align_ = 1;
        }
    }
#endif
    struct stat info;
    if (fstat(file->fd_, &info) != 0) {
        return Status(Code::io, "cannot read the size of '" + label + "': " + std::strerror(errno));
    }
    file->size_ = uint64_t(info.st_size);
    return file;
}

void File::read_buffered() const {
#ifdef O_DIRECT
    fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_DIRECT);
#endif
    direct_ = false;
}

Status File::check(const FileStamp & stamp) const {
    struct stat info;
    if (fstat(fd_, &info) != 0) {
        return { Code::io, "cannot look at '" + label_ + "': " + read_error(errno) };
    }
    const FileStamp found(info);
    if (found == stamp) {
        return {};
    }
    const std::string what = "cannot go on with '" + label_ + "': ";
    if (found.size != stamp.size) {
        return { Code::io, what + "it was truncated or replaced since it was opened, " + std::to_string(stamp.size) +
                               " bytes expected, found " + std::to_string(found.size) +
                               "; restore it and load the model again" };
    }
    return { Code::io, what + "it was written to since it was opened, so its neurons in RAM and on disk may be of "
                              "different files; load the model again" };
}

File::~File() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

} // namespace gguf_flash
