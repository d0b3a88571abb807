// One suite for all readers: what comes back is what the file holds.
#include "read_batch.h"

#include <unistd.h>

#include <cerrno>

using namespace gguf_flash;

namespace {

constexpr uint64_t file_size = (1 << 20) + 777; // ends inside a sector

struct KnownFile {
    explicit KnownFile(const std::string & parent = std::filesystem::temp_directory_path().string())
        : folder(parent), path(folder.write("known", known_bytes(file_size))), file(open_file(path)) {}

    TempFolder folder;
    std::string path;
    std::shared_ptr<File> file;
};

} // namespace

TEST_CASE("readers: random reads, more than the depth, scattered") {
    KnownFile known;
    CHECK(known.file->size() == file_size);
    for_each_reader([&](ReaderKind kind, int depth) {
        std::unique_ptr<Reader> reader = open_reader(kind, depth);
        const std::string name = kind == ReaderKind::pread ? "pread" : "io_uring";
        CHECK(reader->name() == name);
        Random random(uint64_t(depth) * 10 + uint64_t(kind));
        for (int round = 0; round < 3; ++round) {
            ReadBatch batch(*known.file);
            batch.add_random(random, 150, 40000, 9);
            batch.add(0, file_size, max_segments); // the whole file in one
            batch.submit(*reader);
            batch.collect(*reader, random);
            batch.check_all_right();
        }
    });
}

TEST_CASE("readers: enlisted files and memory, in part") {
    KnownFile known, other;
    for_each_reader([&](ReaderKind kind, int depth) {
        for (const char * plan : { "", "short:3,again:5" }) {
            std::unique_ptr<Reader> reader = open_reader(kind, depth, plan);
            Random random(uint64_t(depth) + 3);
            ReadBatch batch(*known.file), beside(*other.file);
            batch.add_random(random, 60, 40000, 1);
            batch.add_random(random, 30, 40000, 5);
            beside.add_random(random, 30, 40000, 2);
            std::vector<iovec> memory; // of every second read, pieces in no order, some cut short
            for (size_t i = batch.size(); i-- > 0;) {
                const iovec & first = batch.op(i).segments[0];
                if (i % 2 == 0) {
                    memory.push_back({ first.iov_base, i % 6 == 0 ? first.iov_len / 2 : first.iov_len });
                }
            }
            reader->enlist({ known.file }, memory);
            for (ReadBatch * b : { &batch, &beside }) {
                b->submit(*reader);
                b->collect(*reader, random);
                b->check_all_right();
            }
        }
    });
}

TEST_CASE("readers: a file system without direct I/O") {
    if (access("/dev/shm", W_OK) != 0) {
        return;
    }
    KnownFile known("/dev/shm");
    for_each_reader([&](ReaderKind kind, int depth) {
        std::unique_ptr<Reader> reader = open_reader(kind, depth);
        Random random(uint64_t(depth) + 1);
        ReadBatch batch(*known.file);
        batch.add_random(random, 100, 20000, 5);
        batch.submit(*reader);
        batch.collect(*reader, random);
        batch.check_all_right();
    });
}

TEST_CASE("readers: the end of the file") {
    KnownFile known;
    const uint64_t align = known.file->align(), last = file_size / align * align;
    for_each_reader([&](ReaderKind kind, int depth) {
        std::unique_ptr<Reader> reader = open_reader(kind, depth);
        Random random(3);
        ReadBatch batch(*known.file);
        batch.add(last, file_size - last, 1); // memory reaches past the end, needed does not
        batch.add(last - align, file_size - last + align, 3);
        const size_t n_good = batch.size();
        batch.add(last, file_size - last + 1, 1); // one byte too many
        batch.add(last - 8 * align, 20 * align, 4);
        batch.add(last + 64 * std::max<uint64_t>(align, 64), 100, 1); // nothing there at all
        batch.submit(*reader);
        batch.collect(*reader, random);
        for (size_t i = 0; i < batch.size(); ++i) {
            CAPTURE(i);
            CHECK(batch.times_done(i) == 1);
            const int expected = i < n_good ? 0 : ENODATA;
            CHECK(batch.op(i).error == expected);
            CHECK((i >= n_good || batch.right(i)));
        }
        CHECK(read_error(ENODATA).find("truncated") != std::string::npos);
    });
}

TEST_CASE("readers: a file that is unlinked or truncated while it is open") {
    for_each_reader([&](ReaderKind kind, int depth) {
        KnownFile known;
        std::unique_ptr<Reader> reader = open_reader(kind, depth);
        Random random(4);
        REQUIRE(unlink(known.path.c_str()) == 0);
        ReadBatch gone(*known.file);
        gone.add_random(random, 40, 20000, 3);
        gone.submit(*reader);
        gone.collect(*reader, random);
        gone.check_all_right();

        KnownFile cut;
        REQUIRE(truncate(cut.path.c_str(), 100000) == 0);
        ReadBatch batch(*cut.file);
        batch.add(0, 50000, 2);
        batch.add(90112, 20000, 2);
        batch.add(204800, 4096, 1);
        batch.submit(*reader);
        batch.collect(*reader, random);
        CHECK(batch.op(0).error == 0);
        CHECK(batch.right(0));
        CHECK(batch.op(1).error == ENODATA);
        CHECK(batch.op(2).error == ENODATA);
    });
}

TEST_CASE("readers: nothing to do") {
    for_each_reader([&](ReaderKind kind, int depth) {
        std::unique_ptr<Reader> reader = open_reader(kind, depth);
        ReadOp * done[4];
        CHECK(reader->poll(done, 4) == 0);
        CHECK(reader->wait(done, 4) == 0);
        reader->flush();
        CHECK(reader->wait(done, 4) == 0);
    });
}

TEST_CASE("readers: destroyed with reads under way") {
    KnownFile known;
    for_each_reader([&](ReaderKind kind, int depth) {
        for (bool flushed : { true, false }) {
            std::unique_ptr<Reader> reader = open_reader(kind, depth);
            Random random(5);
            ReadBatch batch(*known.file);
            batch.add_random(random, 100, 30000, 3);
            batch.submit(*reader);
            if (flushed) {
                reader->flush();
            }
            reader.reset(); // before the memory it reads into
        }
    });
}

TEST_CASE("readers: bad arguments are refused") {
    CHECK(make_reader(ReaderKind::pread, 0, nullptr).status().code() == Code::argument);
    CHECK(make_reader(ReaderKind::automatic, 5000, nullptr).status().code() == Code::argument);
    CHECK(parse_reader("mmap").status().code() == Code::argument);
    CHECK(parse_reader("pread").value() == ReaderKind::pread);
    CHECK(parse_reader("io_uring").value() == ReaderKind::io_uring);
    CHECK(parse_reader("auto").value() == ReaderKind::automatic);
    const auto missing = File::open("/nonexistent/model.gguf", "model.gguf");
    CHECK(missing.status().code() == Code::io);
    CHECK(missing.status().message().find("'model.gguf'") != std::string::npos);
}
