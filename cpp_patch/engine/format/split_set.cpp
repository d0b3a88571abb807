#include "split_set.h"

namespace gguf_flash::format {

namespace {

uint64_t number(const Header & header, const char * key) {
    const Value * v = header.find(key);
    const bool usable = v != nullptr && v->is_integer() && v->numbers[0] >= 0 && v->numbers[0] < double(1 << 30);
    return usable ? uint64_t(v->numbers[0]) : UINT64_MAX;
}

} // namespace

Status check_split_set(const KeyReader & keys, const std::vector<Header> & headers) {
    if (headers[0].find("split.count") == nullptr) {
        return {};
    }
    const uint64_t count = number(headers[0], "split.count");
    if (count <= 1) {
        return {};
    }
    uint64_t tensors = 0;
    bool whole = count == headers.size();
    for (size_t i = 0; i < headers.size(); ++i) {
        whole = whole && number(headers[i], "split.no") == i && number(headers[i], "split.count") == count;
        tensors += headers[i].tensors.size();
    }
    if (!whole || number(headers[0], "split.tensors.count") != tensors) {
        return keys.bad(Code::corrupt,
                        "its split set is incomplete or this is not its first file; put all files in one "
                        "folder and give the first",
                        19);
    }
    return {};
}

} // namespace gguf_flash::format
