// A GGUF file under construction, field by field, so that a test can break any of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

using Bytes = std::vector<uint8_t>;

template <typename T> void put(Bytes & to, T value) {
    const uint8_t * p = reinterpret_cast<const uint8_t *>(&value);
    for (size_t i = 0; i < sizeof(T); ++i) { // insert() draws a false overflow warning from GCC 12
        to.push_back(p[i]);
    }
}

inline void put_string(Bytes & to, const std::string & text) {
    put(to, uint64_t(text.size()));
    to.insert(to.end(), text.begin(), text.end());
}

// Values with their gguf type ids.
template <typename T> Bytes scalar_value(uint32_t type, T value) {
    Bytes out;
    put(out, type);
    put(out, value);
    return out;
}

template <typename T> Bytes array_value(uint32_t type, const std::vector<T> & items) {
    Bytes out;
    put(out, uint32_t(9));
    put(out, type);
    put(out, uint64_t(items.size()));
    for (const T & item : items) {
        if constexpr (std::is_same_v<T, std::string>) {
            put_string(out, item);
        } else {
            put(out, item);
        }
    }
    return out;
}

inline Bytes u32_value(uint32_t v) {
    return scalar_value(4, v);
}
inline Bytes i32_value(int32_t v) {
    return scalar_value(5, v);
}
inline Bytes f32_value(float v) {
    return scalar_value(6, v);
}
inline Bytes bool_value(bool v) {
    return scalar_value(7, uint8_t(v));
}
inline Bytes u16_value(uint16_t v) {
    return scalar_value(2, v);
}
inline Bytes u32_array(const std::vector<uint32_t> & v) {
    return array_value(4, v);
}
inline Bytes f32_array(const std::vector<float> & v) {
    return array_value(6, v);
}
inline Bytes str_array(const std::vector<std::string> & v) {
    return array_value(8, v);
}
inline Bytes str_value(const std::string & text) {
    Bytes out;
    put(out, uint32_t(8));
    put_string(out, text);
    return out;
}

struct ImageTensor {
    std::string name;
    std::vector<uint64_t> ne;
    uint32_t type = 0;
    Bytes data;
    std::optional<uint64_t> offset; // in the data section; absent: after the tensor before
};

struct ImageKey {
    std::string name;
    Bytes value;
};

struct GgufImage {
    std::string magic = "GGUF";
    uint32_t version = 3;
    std::optional<uint64_t> n_tensors, n_keys; // instead of the true counts
    std::vector<ImageKey> keys;
    std::vector<ImageTensor> tensors;

    void set(const std::string & name, Bytes value) {
        for (ImageKey & key : keys) {
            if (key.name == name) {
                key.value = std::move(value);
                return;
            }
        }
        keys.push_back({ name, std::move(value) });
    }
    void remove(const std::string & name) {
        for (size_t i = 0; i < keys.size(); ++i) {
            if (keys[i].name == name) {
                keys.erase(keys.begin() + long(i));
                return;
            }
        }
    }
    ImageTensor & tensor(const std::string & name) {
        for (ImageTensor & t : tensors) {
            if (t.name == name) {
                return t;
            }
        }
        tensors.push_back({ name, {}, 0, {}, {} });
        return tensors.back();
    }
    void remove_tensor(const std::string & name) {
        for (size_t i = 0; i < tensors.size(); ++i) {
            if (tensors[i].name == name) {
                tensors.erase(tensors.begin() + long(i));
                return;
            }
        }
    }

    static uint64_t up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

    // Everything before the padding in front of the data section.
    Bytes header() const {
        Bytes out(magic.begin(), magic.end());
        put(out, version);
        put(out, n_tensors.value_or(tensors.size()));
        put(out, n_keys.value_or(keys.size()));
        for (const ImageKey & key : keys) {
            put_string(out, key.name);
            out.insert(out.end(), key.value.begin(), key.value.end());
        }
        uint64_t next = 0;
        for (const ImageTensor & t : tensors) {
            put_string(out, t.name);
            put(out, uint32_t(t.ne.size()));
            for (uint64_t n : t.ne) {
                put(out, n);
            }
            put(out, t.type);
            put(out, t.offset.value_or(next));
            next = up(t.offset.value_or(next) + t.data.size(), 32);
        }
        return out;
    }

    // Adds the key flash_ffn.pad that makes the data section start on a sector.
    void pad_header() {
        set("flash_ffn.pad", str_value(""));
        const uint64_t size = header().size();
        set("flash_ffn.pad", str_value(std::string(up(size, 4096) - size, ' ')));
    }

    Bytes bytes() const {
        Bytes out = header();
        const uint64_t start = up(out.size(), 32);
        uint64_t next = start;
        for (const ImageTensor & t : tensors) {
            const uint64_t at = t.offset ? start + *t.offset : next;
            if (t.offset && *t.offset > (1u << 30)) {
                continue; // a broken offset; there is nothing to write so far out
            }
            out.resize(std::max<uint64_t>(out.size(), up(at + t.data.size(), 32)));
            if (!t.data.empty()) {
                std::memcpy(out.data() + at, t.data.data(), t.data.size());
            }
            next = up(at + t.data.size(), 32);
        }
        return out;
    }
};
