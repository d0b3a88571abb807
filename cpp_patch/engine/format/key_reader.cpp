#include "key_reader.h"

#include "ggml-cpu.h"
#include "rejection.h"

#include <cmath>
#include <cstdio>

namespace gguf_flash::format {

// Integer and intermediate types exist for tensors, but hold no weights.
bool is_weight_type(int type) {
    switch (type) {
        case -1:
        case GGML_TYPE_I8:
        case GGML_TYPE_I16:
        case GGML_TYPE_I32:
        case GGML_TYPE_I64:
        case GGML_TYPE_F64:
        case GGML_TYPE_Q8_1:
        case GGML_TYPE_Q8_K: return false;
        default:
            return ggml_blck_size(ggml_type(type)) > 0 && ggml_type_size(ggml_type(type)) > 0 &&
                   ggml_get_type_traits_cpu(ggml_type(type))->vec_dot != nullptr;
    }
}

Status KeyReader::bad(Code code, const std::string & what, int rule) const {
    return reject(code, label_, what, rule);
}

Status KeyReader::corrupt(const std::string & what, int rule) const {
    return bad(Code::corrupt, what + "; convert the model again", rule);
}

Status KeyReader::missing(const std::string & key, const std::string & type) const {
    return corrupt("key '" + key + "' is missing or not " + type, 6);
}

Status KeyReader::integer(const std::string & key, uint64_t & value) const {
    const Value * v = find(key);
    if (v == nullptr || !v->is(value_u32)) {
        return missing(key, "a u32");
    }
    value = uint64_t(v->numbers[0]);
    return {};
}

Status KeyReader::boolean(const std::string & key, bool & value) const {
    const Value * v = find(key);
    if (v == nullptr || !v->is(value_bool)) {
        return missing(key, "a bool");
    }
    value = v->numbers[0] != 0;
    return {};
}

Status KeyReader::numbers(const std::string & key, uint32_t type, const Expected & expected,
                          std::vector<double> & values) const {
    values.clear();
    const Value * v = find(key);
    if (v == nullptr && !expected.required) {
        return {};
    }
    if (v == nullptr || !v->is_array_of(type)) {
        return missing(key, type == value_u32 ? "an array of u32" : "an array of f32");
    }
    bool good = v->numbers.size() == expected.count;
    for (double n : v->numbers) {
        good = good && std::isfinite(n) && n >= 0 && n < expected.below;
    }
    if (!good) {
        char limit[32];
        std::snprintf(limit, sizeof(limit), "%g", expected.below);
        return corrupt("'" + key + "' does not hold " + std::to_string(expected.count) +
                           " finite numbers of at least 0" +
                           (expected.below < 1e308 ? " and less than " + std::string(limit) : ""),
                       expected.rule);
    }
    values = v->numbers;
    return {};
}

} // namespace gguf_flash::format
