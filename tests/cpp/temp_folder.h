// A folder for a test's files, removed with everything in it.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

class TempFolder {
public:
    // Not /dev/shm by default: files there have no direct I/O.
    explicit TempFolder(const std::string & parent = std::filesystem::temp_directory_path().string()) {
        std::string name = parent + "/gguf_flash_test_XXXXXX";
        if (mkdtemp(&name[0]) == nullptr) {
            throw std::runtime_error("cannot create a folder in " + parent);
        }
        path_ = name;
    }
    ~TempFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TempFolder(const TempFolder &) = delete;
    TempFolder & operator=(const TempFolder &) = delete;

    std::string file(const std::string & name) const { return path_ + "/" + name; }
    std::string write(const std::string & name, const std::vector<uint8_t> & bytes) const {
        std::FILE * out = std::fopen(file(name).c_str(), "wb");
        const bool ok = out != nullptr && (bytes.empty() || std::fwrite(bytes.data(), bytes.size(), 1, out) == 1);
        if (out == nullptr || std::fclose(out) != 0 || !ok) {
            throw std::runtime_error("cannot write " + file(name));
        }
        return file(name);
    }

private:
    std::string path_;
};
