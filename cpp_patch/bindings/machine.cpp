#include "bindings.h"

#include "gguf_flash/kernels.h"
#include "gguf_flash/reader.h"

#include <cstdlib>

#include <fcntl.h>
#include <unistd.h>

namespace py = pybind11;

namespace gguf_flash {

namespace {

// Direct I/O is a property of the file system: a file is needed to ask it, so a folder gets one.
py::dict machine(const std::string & path) {
    py::dict d;
    d["simd"] = kernels().name;
    const std::string problem = io_uring_problem();
    d["io_uring"] = problem.empty();
    d["io_uring_error"] = problem;
    d["direct_io"] = false;
    d["dio_align"] = 0;
    if (path.empty()) {
        return d;
    }
    std::string name = path + "/.gguf_flash-XXXXXX";
    const int fd = mkstemp(&name[0]);
    const bool temporary = fd >= 0;
    if (temporary) {
        close(fd);
    }
    Result<std::shared_ptr<File>> file = File::open(temporary ? name : path, path);
    if (temporary) {
        unlink(name.c_str());
    }
    raise_if_failed(file.status());
    d["direct_io"] = file.value()->direct();
    d["dio_align"] = file.value()->direct() ? file.value()->align() : 0;
    return d;
}

} // namespace

void init_machine(py::module_ & m) {
    m.def("machine", &machine, py::arg("path") = "",
          "What this machine offers: SIMD level, io_uring, and for path (a file or a writable folder) direct I/O and "
          "its alignment in bytes.");
}

} // namespace gguf_flash
