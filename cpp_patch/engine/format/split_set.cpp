#include "split_set.h"

#include "rejection.h"

#include <unistd.h>

namespace gguf_flash::format {

namespace {

uint64_t number(const Header & header, const char * key) {
    const Value * v = header.find(key);
    const bool usable = v != nullptr && v->is_integer() && v->numbers[0] >= 0 && v->numbers[0] < double(1 << 30);
    return usable ? uint64_t(v->numbers[0]) : UINT64_MAX;
}

Status incomplete(const std::string & label, const std::string & what) {
    return reject(Code::corrupt, label, what + "; put all files of the split set in one folder and give the first", 19);
}

bool is_file(const Header & header, uint64_t no, uint64_t count) {
    return number(header, "split.no") == no && number(header, "split.count") == count;
}

// The files behind the first.
Status read_others(const std::vector<std::string> & paths, const std::vector<std::string> & labels,
                   std::vector<Header> & headers) {
    const std::string & label = labels[0];
    for (size_t i = 1; i < paths.size(); ++i) {
        Result<Header> header = read_header(paths[i], labels[i]);
        if (!header.ok()) {
            const bool missing = header.status().code() == Code::io && access(paths[i].c_str(), F_OK) != 0;
            return missing ? incomplete(label, header.status().message()) : header.status();
        }
        if (!is_file(header.value(), i, paths.size())) {
            return incomplete(label, "'" + labels[i] + "' is not file " + std::to_string(i) + " of " +
                                         std::to_string(paths.size()) + ", counted from 0");
        }
        headers.push_back(std::move(header.value()));
    }
    return {};
}

} // namespace

Result<std::vector<Header>> read_set(const std::vector<std::string> & paths, const std::vector<std::string> & labels) {
    const std::string & label = labels[0];
    Result<Header> first = read_header(paths[0], label);
    if (!first.ok()) {
        return first.status();
    }
    std::vector<Header> headers = { std::move(first.value()) };
    const uint64_t count = headers[0].find("split.count") == nullptr ? 1 : number(headers[0], "split.count");
    if (count <= 1) {
        return headers;
    }
    if (count != paths.size() || !is_file(headers[0], 0, count)) {
        return incomplete(label, "it is not the first file of a split set whose files are " +
                                     std::to_string(paths.size()) + " by their names");
    }
    const Status status = read_others(paths, labels, headers);
    if (!status.ok()) {
        return status;
    }
    uint64_t tensors = 0;
    for (const Header & header : headers) {
        tensors += header.tensors.size();
    }
    if (number(headers[0], "split.tensors.count") != tensors) {
        return incomplete(label, "its split set has " + std::to_string(tensors) + " tensors, not what it promises");
    }
    return headers;
}

} // namespace gguf_flash::format
