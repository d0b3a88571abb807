// Readers on a disk that misbehaves: whatever can be retried is, and one error is one error.
#include "read_batch.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>

using namespace gguf_flash;

namespace {

struct FaultyDisk {
    FaultyDisk() : path(folder.write("known", known_bytes((1 << 19) + 321))), file(open_file(path)) {}

    TempFolder folder;
    std::string path;
    std::shared_ptr<File> file;
};

bool denied(ReaderKind kind, const std::string & plan) {
    return kind == ReaderKind::io_uring && plan.find("uring:") != std::string::npos;
}

std::vector<int> errors_of(ReadBatch & batch, Reader & reader, Random & random) {
    batch.submit(reader);
    batch.collect(reader, random);
    std::vector<int> errors;
    for (size_t i = 0; i < batch.size(); ++i) {
        errors.push_back(batch.op(i).error);
        CHECK(batch.times_done(i) == 1);
        CHECK((errors.back() != 0 || batch.right(i)));
    }
    return errors;
}

} // namespace

TEST_CASE("read faults: short reads, interruptions and delays leave the data right") {
    FaultyDisk disk;
    for_each_reader([&](ReaderKind kind, int depth) {
        for (const char * plan : { "short:1", "short:3", "again:2", "short:3,again:5", "short:1,again:2", "delay:200",
                                   "short:2,again:3,delay:50", "reorder:4", "reorder:100", "reorder:7,short:2,again:3",
                                   "einval:1", "einval:9,short:3", "uring:EPERM" }) {
            CAPTURE(std::string(plan));
            if (denied(kind, plan)) {
                continue;
            }
            std::unique_ptr<Reader> reader = open_reader(kind, depth, plan);
            Random random{ uint64_t(depth) };
            const auto file = open_file(disk.path); // einval takes direct reads from it
            ReadBatch batch(*file);
            batch.add_random(random, 40, 30000, 7);
            batch.add(0, file->size(), 5);
            batch.submit(*reader);
            batch.collect(*reader, random);
            batch.check_all_right();
        }
    });
}

TEST_CASE("read faults: an error is reported once and the reader goes on") {
    FaultyDisk disk;
    for_each_reader([&](ReaderKind kind, int depth) {
        for (const char * plan : { "eio:1", "eio:17", "eio:60", "eio:33,short:2,again:3" }) {
            CAPTURE(std::string(plan));
            std::unique_ptr<Reader> reader = open_reader(kind, depth, plan);
            Random random(uint64_t(depth) + 9);
            ReadBatch batch(*disk.file);
            batch.add_random(random, 60, 20000, 4);
            batch.submit(*reader);
            batch.collect(*reader, random);
            int errors = 0;
            for (size_t i = 0; i < batch.size(); ++i) {
                const int error = batch.op(i).error;
                errors += error != 0;
                CHECK((error == 0 ? batch.right(i) : error == EIO));
                CHECK(batch.times_done(i) == 1);
            }
            CHECK(errors == 1);
            ReadBatch after(*disk.file);
            after.add_random(random, 30, 20000, 4);
            after.submit(*reader);
            after.collect(*reader, random);
            after.check_all_right();
        }
    });
}

TEST_CASE("read faults: short reads do not hide the end of the file") {
    FaultyDisk disk;
    for_each_reader([&](ReaderKind kind, int depth) {
        std::unique_ptr<Reader> reader = open_reader(kind, depth, "short:1");
        Random random(2);
        ReadBatch batch(*disk.file);
        const uint64_t start = disk.file->size() / 65536 * 65536;
        batch.add(start, disk.file->size() - start, 2);
        batch.add(start, disk.file->size() - start + 1, 2);
        batch.submit(*reader);
        batch.collect(*reader, random);
        CHECK(batch.op(0).error == 0);
        CHECK(batch.right(0));
        CHECK(batch.op(1).error == ENODATA);
    });
}

TEST_CASE("read faults: a device that goes fails every read, and none once it is back") {
    FaultyDisk disk;
    for_each_reader([&](ReaderKind kind, int depth) {
        std::unique_ptr<Reader> reader = open_reader(kind, depth, "vanish:11-70");
        Random random(uint64_t(depth) + 21);
        std::vector<int> found;
        for (int round = 0; round < 10; ++round) {
            ReadBatch batch(*disk.file);
            batch.add_random(random, 10, 20000, 4);
            const std::vector<int> errors = errors_of(batch, *reader, random);
            found.insert(found.end(), errors.begin(), errors.end());
        }
        std::vector<int> expected(100, 0);
        std::fill(expected.begin() + 10, expected.begin() + 70, ENODEV);
        CHECK(found == expected);

        reader = open_reader(kind, depth, "vanish:1");
        ReadBatch gone(*disk.file);
        gone.add_random(random, 40, 20000, 4);
        CHECK(errors_of(gone, *reader, random) == std::vector<int>(40, ENODEV));
    });
}

TEST_CASE("read faults: a device that is never ready ends in an error") {
    FaultyDisk disk;
    for (ReaderKind kind : reader_kinds()) {
        std::unique_ptr<Reader> reader = open_reader(kind, 2, "again:1");
        Random random(5);
        ReadBatch batch(*disk.file);
        batch.add(0, 4096, 1);
        CHECK(errors_of(batch, *reader, random) == std::vector<int>{ EAGAIN });
    }
}

TEST_CASE("read faults: a read that takes seconds") {
    FaultyDisk disk;
    for (ReaderKind kind : reader_kinds()) {
        std::unique_ptr<Reader> reader = open_reader(kind, 4, "stall:3");
        Random random(6);
        ReadBatch batch(*disk.file);
        batch.add_random(random, 12, 20000, 4);
        const auto start = std::chrono::steady_clock::now();
        CHECK(errors_of(batch, *reader, random) == std::vector<int>(12, 0));
        CHECK(std::chrono::steady_clock::now() - start >= std::chrono::seconds(3));
    }
}

TEST_CASE("read faults: results in another order") {
    FaultyDisk disk;
    for (ReaderKind kind : reader_kinds()) {
        std::unique_ptr<Reader> reader = open_reader(kind, 1, "reorder:5"); // one at a time: they come in order
        ReadBatch batch(*disk.file);
        for (uint64_t i = 0; i < 12; ++i) {
            batch.add(i * 4096, 4096, 1);
        }
        batch.submit(*reader);
        std::vector<uint32_t> order;
        ReadOp * done[16];
        while (const size_t n = reader->wait(done, 16)) {
            for (size_t i = 0; i < n; ++i) {
                order.push_back(done[i]->tag);
            }
        }
        CHECK(order.size() == 12);
        CHECK_FALSE(std::is_sorted(order.begin(), order.end()));
        CHECK(std::set<uint32_t>(order.begin(), order.end()).size() == 12);
        for (size_t i = 0; i < batch.size(); ++i) {
            CHECK(batch.right(i));
        }
    }
}

TEST_CASE("read faults: a direct read that is refused is made through the page cache") {
    FaultyDisk disk;
    if (!disk.file->direct()) {
        MESSAGE("no direct I/O in " << disk.path);
        return;
    }
    for_each_reader([&](ReaderKind kind, int depth) {
        const auto file = open_file(disk.path);
        std::unique_ptr<Reader> reader = open_reader(kind, depth, "einval:4,short:3");
        Random random(uint64_t(depth) + 31);
        ReadBatch batch(*file);
        batch.add_random(random, 40, 20000, 4);
        CHECK(errors_of(batch, *reader, random) == std::vector<int>(40, 0));
        CHECK_FALSE(file->direct());
        CHECK(disk.file->direct()); // of another opening of it nobody spoke

        reader = open_reader(kind, depth, "einval:1"); // and again, where nothing is left to give up
        ReadBatch more(*file);
        more.add_random(random, 10, 20000, 4);
        CHECK(errors_of(more, *reader, random) == std::vector<int>(10, 0));
    });
}

TEST_CASE("read faults: io_uring is denied") {
    for (const auto & [plan, words] : { std::pair("uring:EPERM", "Operation not permitted"),
                                        std::pair("uring:ENOSYS", "Function not implemented") }) {
        const auto faults = FaultPlan::parse(plan).value();
        const auto asked = make_reader(ReaderKind::io_uring, 4, faults);
        CHECK(asked.status().code() == Code::io);
        CHECK(asked.status().message().find(words) != std::string::npos);
        CHECK(asked.status().message().find("use the reader 'pread'") != std::string::npos);
        auto automatic = make_reader(ReaderKind::automatic, 4, faults);
        REQUIRE(automatic.ok());
        CHECK(automatic.value()->name() == std::string("pread"));
    }
}

TEST_CASE("read faults: every error says what to do") {
    for (int error : { EIO, ENODEV, ENXIO, ESTALE, EAGAIN, ENOMEM, EPERM, ENOSYS, EINVAL, ENODATA }) {
        const std::string text = read_error(error);
        CAPTURE(text);
        const bool has_cause = error == ENODATA || text.rfind(std::strerror(error), 0) == 0;
        CHECK(has_cause);
        CHECK(text.find_first_of(";,") < text.size() - 10);
        CHECK(text.find('\n') == std::string::npos);
    }
}

TEST_CASE("read faults: plans are checked") {
    for (const char * bad : { "eio", "eio:0", "eio:x", "eio:-1", "mystery:3", "short:3;again:5", ":4", "short:-",
                              "vanish:0", "vanish:9-3", "vanish:3-", "uring:EIO", "uring:1", "stall:1s", "reorder:" }) {
        CAPTURE(std::string(bad));
        const auto plan = FaultPlan::parse(bad);
        CHECK(plan.status().code() == Code::argument);
        CHECK(plan.status().message().find(bad) != std::string::npos);
    }
    CHECK(FaultPlan::parse("").ok());
    CHECK(FaultPlan::parse("eio:100,short:3,again:5,delay:200").ok());
    CHECK(FaultPlan::parse("einval:1,vanish:3-9,stall:2,reorder:8,uring:ENOSYS").ok());
}

TEST_CASE("read faults: what a plan does to results") {
    auto plan = FaultPlan::parse("eio:2,again:3,short:5").value();
    CHECK(plan->apply(8192, 512) == 8192);
    CHECK(plan->apply(8192, 512) == -EIO);
    CHECK(plan->apply(8192, 512) == -EAGAIN);
    CHECK(plan->apply(8192, 512) == 8192);
    CHECK(plan->apply(8192, 512) == 4096);
    auto gone = FaultPlan::parse("vanish:2-3,einval:4").value();
    CHECK(gone->apply(8192, 512) == 8192);
    CHECK(gone->apply(8192, 512) == -ENODEV);
    CHECK(gone->apply(0, 512) == -ENODEV);
    CHECK(gone->apply(8192, 512) == -EINVAL);
    CHECK(gone->apply(8192, 512) == 8192);
    auto shorts = FaultPlan::parse("short:1").value();
    CHECK(shorts->apply(512, 512) == 512); // cannot be shorter
    CHECK(shorts->apply(1536, 512) == 512);
    CHECK(shorts->apply(0, 512) == 0);
    CHECK(shorts->apply(-EINTR, 512) == -EINTR);
}
