// Outcome of an engine call.
//
// The engine never prints, aborts or throws across its interface: every path that touches a file,
// the operating system or a caller's argument returns a Status (or a Result). A message is one
// sentence for the user: what failed, where, what was expected, what was found, what to do.
#pragma once

#include <memory>
#include <string>
#include <utility>

namespace gguf_flash {

// One code per exception class of the Python package (gguf_flash/errors.py).
enum class Code {
    ok,
    not_flash,     // an ordinary GGUF, or no GGUF at all
    corrupt,       // truncated, overlapping or inconsistent file
    version,       // written by a newer gguf_flash
    unsupported,   // legal, but not something this build runs
    ram_too_small, // the byte budget holds no working cache
    io,            // the operating system refused a read
    argument,      // the caller's mistake
};

class Status {
public:
    Status() = default;
    Status(Code code, std::string message)
        : code_(code), message_(std::make_shared<const std::string>(std::move(message))) {}

    bool ok() const { return code_ == Code::ok; }
    Code code() const { return code_; }
    const std::string & message() const {
        static const std::string none;
        return message_ == nullptr ? none : *message_;
    }

private:
    Code code_ = Code::ok;
    std::shared_ptr<const std::string> message_; // shared, so that a copy needs no memory
};

// A value, or the Status that says why there is none. value() may be called only when ok().
template <typename T> class Result {
public:
    Result(T value) : value_(std::move(value)) {}
    Result(Status status) : status_(std::move(status)) {}

    bool ok() const { return status_.ok(); }
    const Status & status() const { return status_; }
    T & value() { return value_; }
    const T & value() const { return value_; }

private:
    Status status_;
    T value_{};
};

} // namespace gguf_flash
