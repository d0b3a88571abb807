// Readers on a disk that misbehaves: whatever can be retried is, and one error is one error.
#include "read_batch.h"

#include <cerrno>

using namespace gguf_flash;

namespace {

struct FaultyDisk {
    FaultyDisk() : path(folder.write("known", known_bytes((1 << 19) + 321))), file(open_file(path)) {}

    TempFolder folder;
    std::string path;
    std::shared_ptr<File> file;
};

} // namespace

TEST_CASE("read faults: short reads, interruptions and delays leave the data right") {
    FaultyDisk disk;
    for_each_reader([&](ReaderKind kind, int depth) {
        for (const char * plan : { "short:1", "short:3", "again:2", "short:3,again:5", "short:1,again:2", "delay:200",
                                   "short:2,again:3,delay:50" }) {
            CAPTURE(std::string(plan));
            std::unique_ptr<Reader> reader = open_reader(kind, depth, plan);
            Random random{ uint64_t(depth) };
            ReadBatch batch(*disk.file);
            batch.add_random(random, 40, 30000, 7);
            batch.add(0, disk.file->size(), 5);
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

TEST_CASE("read faults: plans are checked") {
    for (const char * bad : { "eio", "eio:0", "eio:x", "mystery:3", "short:3;again:5", ":4", "short:-" }) {
        CAPTURE(std::string(bad));
        const auto plan = FaultPlan::parse(bad);
        CHECK(plan.status().code() == Code::argument);
        CHECK(plan.status().message().find(bad) != std::string::npos);
    }
    CHECK(FaultPlan::parse("").ok());
    CHECK(FaultPlan::parse("eio:100,short:3,again:5,delay:200").ok());
}

TEST_CASE("read faults: what a plan does to results") {
    auto plan = FaultPlan::parse("eio:2,again:3,short:5").value();
    CHECK(plan->apply(8192, 512) == 8192);
    CHECK(plan->apply(8192, 512) == -EIO);
    CHECK(plan->apply(8192, 512) == -EAGAIN);
    CHECK(plan->apply(8192, 512) == 8192);
    CHECK(plan->apply(8192, 512) == 4096);
    auto shorts = FaultPlan::parse("short:1").value();
    CHECK(shorts->apply(512, 512) == 512); // cannot be shorter
    CHECK(shorts->apply(1536, 512) == 512);
    CHECK(shorts->apply(0, 512) == 0);
    CHECK(shorts->apply(-EINTR, 512) == -EINTR);
}
