#include "gguf_flash/model.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace gguf_flash {

namespace {

// A number followed by one of the units, or nothing.
bool parse_number(const std::string & text, double & number, std::string & unit) {
    char * end = nullptr;
    number = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || !std::isfinite(number) || number < 0) {
        return false;
    }
    while (*end == ' ') {
        ++end;
    }
    unit = end;
    return true;
}

double unit_bytes(std::string unit) {
    if (unit.size() > 1 && (unit.back() == 'B' || unit.back() == 'b')) {
        unit.pop_back();
    }
    const bool binary = unit.size() == 2 && unit[1] == 'i';
    const char * letters = "KMGT";
    const char * at = unit.empty() ? nullptr : std::strchr(letters, std::toupper(unit[0]));
    if (at == nullptr || (unit.size() != 1 && !binary)) {
        return unit.empty() || unit == "B" ? 1 : 0;
    }
    return std::pow(binary ? 1024.0 : 1000.0, double(at - letters) + 1);
}

Status bad(const std::string & name, const std::string & expected, const std::string & value) {
    return { Code::argument, "cannot set '" + name + "': " + expected + " expected, found '" + value + "'" };
}

Status set_ram(Settings & s, const std::string & value) {
    double number = 0;
    std::string unit;
    const char * expected = "bytes such as 200MiB or a share such as 60%";
    if (value == "auto") {
        s.ram_bytes = 0;
        s.ram_share = 0;
        return {};
    }
    if (!parse_number(value, number, unit)) {
        return bad("ram", expected, value);
    }
    if (unit == "%") {
        if (number > 100) {
            return bad("ram", "a share from 0% to 100%", value);
        }
        s.ram_bytes = 0;
        s.ram_share = std::max(number / 100, 1e-9);
        return {};
    }
    if (number <= 0 || unit_bytes(unit) == 0 || number * unit_bytes(unit) >= 1e18) {
        return bad("ram", expected, value);
    }
    s.ram_bytes = uint64_t(number * unit_bytes(unit));
    s.ram_share = 0;
    return {};
}

template <typename T>
Status set_integer(const std::string & name, const std::string & value, long min, long max, T & to) {
    char * end = nullptr;
    const long n = std::strtol(value.c_str(), &end, 10);
    if (value.empty() || *end != 0 || n < min || n > max) {
        return bad(name, "an integer from " + std::to_string(min) + " to " + std::to_string(max), value);
    }
    to = T(n);
    return {};
}

Status set_thresholds(const std::string & name, const std::string & value, double below, std::vector<float> & to) {
    std::vector<float> numbers;
    for (size_t at = 0; at <= value.size();) {
        const size_t comma = std::min(value.find(',', at), value.size());
        double number = 0;
        std::string unit;
        if (!parse_number(value.substr(at, comma - at), number, unit) || !unit.empty() ||
            double(float(number)) >= below) {
            return bad(name, below > 1 ? "a number, zero or more, or a list of them" : "a number in [0, 1) or a list",
                       value);
        }
        numbers.push_back(float(number));
        at = comma + 1;
    }
    to = std::move(numbers);
    return {};
}

Status set_choice(Settings & s, const std::string & name, const std::string & value) {
    if (name == "policy") {
        if (value != "budget" && value != "window" && value != "score") {
            return bad(name, "budget, window or score", value);
        }
        s.policy = value == "budget" ? Policy::budget : value == "window" ? Policy::window : Policy::score;
    } else if (name == "lookahead" || name == "watch") {
        if (value != "on" && value != "off") {
            return bad(name, "on or off", value);
        }
        (name == "watch" ? s.watch : s.lookahead) = value == "on";
    } else {
        if (value != "auto" && value != "select" && value != "stream") {
            return bad(name, "auto, select or stream", value);
        }
        s.prefill = value == "auto" ? Prefill::automatic : value == "select" ? Prefill::select : Prefill::stream;
    }
    return {};
}

template <typename T> Status assign(Result<T> parsed, T & to) {
    if (parsed.ok()) {
        to = parsed.value();
    }
    return parsed.status();
}

} // namespace

const std::vector<std::string> & Settings::names() {
    static const std::vector<std::string> all = {
        "ram",        "watch",     "window", "policy", "reader", "depth", "prefill", "threshold", "predictor_threshold",
        "activation", "lookahead", "gap",    "faults"
    };
    return all;
}

Status Settings::set(const std::string & name, const std::string & value) {
    if (name == "ram") {
        return set_ram(*this, value);
    }
    if (name == "window") {
        return set_integer(name, value, 1, 1000000, window);
    }
    if (name == "depth") {
        return set_integer(name, value, 1, 4096, depth);
    }
    if (name == "gap") {
        return set_integer(name, value, 0, 1 << 20, gap);
    }
    if (name == "policy" || name == "prefill" || name == "lookahead" || name == "watch") {
        return set_choice(*this, name, value);
    }
    if (name == "reader") {
        return assign(parse_reader(value), reader);
    }
    if (name == "threshold") {
        return set_thresholds(name, value, 1e30, threshold);
    }
    if (name == "predictor_threshold") {
        return set_thresholds(name, value, 1, predictor_threshold);
    }
    if (name == "activation") {
        return assign(parse_activation(value), activation);
    }
    if (name == "faults") {
        const Status status = FaultPlan::parse(value).status();
        faults = status.ok() ? value : faults;
        return status;
    }
    return { Code::argument, "unknown setting 'flash_ffn." + name + "'" };
}

Status Settings::set_from_environment() {
    for (const std::string & name : names()) {
        std::string variable = "GGUF_FLASH_" + name;
        std::transform(variable.begin(), variable.end(), variable.begin(), ::toupper);
        const char * value = std::getenv(variable.c_str());
        const Status status = value != nullptr && *value != 0 ? set(name, value) : Status();
        if (!status.ok()) {
            return { status.code(), status.message() + " in " + variable };
        }
    }
    return {};
}

} // namespace gguf_flash
