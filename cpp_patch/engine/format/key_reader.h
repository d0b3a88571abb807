// Private to format/: the flash_ffn.* keys of a header, and the messages of the rejection rules.
#pragma once

#include "gguf_header.h"

namespace gguf_flash::format {

// A ggml type that rows of weights may have: a part of a bundle, a deciding or a predictor matrix.
bool is_weight_type(int type);

class KeyReader {
public:
    // Both outlive the reader; label names the file in messages.
    KeyReader(const std::string & label, const Header & header) : label_(label), header_(header) {}

    Status bad(Code code, const std::string & what, int rule) const;
    Status corrupt(const std::string & what, int rule) const;
    Status missing(const std::string & key, const std::string & type) const; // R6
    const Value * find(const std::string & key) const { return header_.find(key); }
    Status integer(const std::string & key, uint64_t & value) const; // a u32
    Status boolean(const std::string & key, bool & value) const;

    // What an array of numbers must be like; rule is reported when it is not.
    struct Expected {
        size_t count;
        int rule;
        bool required = true;
        double below = 1e308;
    };
    // count finite numbers from 0 to less than below, of type value_u32 or value_f32; none if the key is
    // absent and optional.
    Status numbers(const std::string & key, uint32_t type, const Expected & expected,
                   std::vector<double> & values) const;

protected:
    const std::string & label_;

private:
    const Header & header_;
};

} // namespace gguf_flash::format
