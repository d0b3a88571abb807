// Direct reads want aligned memory, offsets and lengths, tensors have none of these: reads fill a ring of
// staging memory, and what a tensor needs is copied out while the next ones are on their way.
#include "gguf_flash/resident.h"

#include "gguf_flash/model.h"
#include "gguf_flash/round.h"
#include "layer_state.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace gguf_flash {

namespace {

constexpr uint64_t near = 64 << 10; // bytes between two tensors that are read through rather than left out

// Bytes of a file that one read gets.
struct Span {
    uint32_t file;
    uint64_t begin, end; // begin is aligned
};

class ResidentReader {
public:
    ResidentReader(const std::vector<std::shared_ptr<File>> & files, const std::vector<Resident> & tensors,
                   Reader & reader, const ResidentLoaded & loaded)
        : files_(files), tensors_(tensors), reader_(reader), loaded_(loaded) {
        for (const Resident & tensor : tensors) {
            plan(tensor);
        }
    }
    ~ResidentReader() {
        ReadOp * done[load_depth];
        while (reader_.wait(done, load_depth) > 0) { // into memory that is about to go
        }
    }

    Result<bool> run() {
        if (!staging_.allocate(load_staging)) {
            return without_memory("reserve " + std::to_string(load_staging) + " bytes for loading");
        }
        reader_.enlist(files_, { { staging_.data(), staging_.bytes() } });
        for (; submitted_ < std::min<size_t>(spans_.size(), load_depth); ++submitted_) {
            submit(submitted_);
        }
        for (size_t i = 0; i < spans_.size(); ++i) {
            Status status = await(i);
            status = status.ok() ? hand_out(i) : status;
            if (!status.ok() || stopped_) {
                return status.ok() ? Result<bool>(false) : Result<bool>(status);
            }
            if (submitted_ < spans_.size()) {
                submit(submitted_++);
            }
        }
        return true;
    }

private:
    // Appends the reads of a tensor; what the last read can hold beside its own goes into that.
    void plan(const Resident & tensor) {
        uint64_t at = tensor.offset;
        const uint64_t end = tensor.offset + tensor.bytes;
        if (!spans_.empty() && spans_.back().file == tensor.file) {
            Span & last = spans_.back();
            if (at >= last.end && at - last.end <= near && at < last.begin + load_read) {
                last.end = at = std::min(end, last.begin + load_read);
            }
        }
        while (at < end) {
            const uint64_t begin = round_down(at, files_[tensor.file]->align());
            at = std::min(end, begin + load_read);
            spans_.push_back({ tensor.file, begin, at });
        }
    }

    uint8_t * slot(size_t span) const { return staging_.data() + span % load_depth * load_read; }

    void submit(size_t span) {
        const Span & s = spans_[span];
        ReadOp & op = ops_[span % load_depth];
        op = ReadOp();
        op.file = files_[s.file].get();
        op.offset = s.begin;
        op.needed = s.end - s.begin;
        op.n_segments = 1;
        op.segments = &segments_[span % load_depth];
        op.segments[0] = { slot(span), size_t(round_up(op.needed, op.file->align())) };
        arrived_[span % load_depth] = false;
        op.tag = uint32_t(span % load_depth);
        reader_.submit(&op);
        reader_.flush();
    }

    Status await(size_t span) {
        ReadOp * done[load_depth];
        while (!arrived_[span % load_depth]) {
            const size_t n = reader_.wait(done, load_depth);
            for (size_t i = 0; i < n; ++i) {
                arrived_[done[i]->tag] = true;
            }
        }
        return ops_[span % load_depth].error == 0 ? Status() : failure(ops_[span % load_depth]);
    }

    // A read serves several tensors: the one that lacks the byte is named.
    Status failure(const ReadOp & op) const {
        const uint64_t byte = op.offset + op.got;
        size_t lacks = tensor_;
        while (lacks + 1 < tensors_.size() && tensors_[lacks].offset + tensors_[lacks].bytes <= byte) {
            ++lacks;
        }
        return { Code::io, "cannot read tensor '" + tensors_[lacks].name + "' at byte " + std::to_string(byte) +
                               " of '" + op.file->label() + "': " + read_error(op.error) };
    }

    // Where the tensor under way is gathered; null without memory.
    uint8_t * target() {
        const Resident & t = tensors_[tensor_];
        const bool fits = lent_.bytes() >= t.bytes && lent_.bytes() / 2 <= t.bytes;
        if (t.to != nullptr) {
            return t.to;
        }
        return fits || filled_ > 0 || lent_.allocate(t.bytes) ? lent_.data() : nullptr;
    }

    // Gives the tensors their bytes of a span that has arrived.
    Status hand_out(size_t span) {
        const Span & s = spans_[span];
        for (; tensor_ < tensors_.size(); ++tensor_, filled_ = 0) {
            const Resident & t = tensors_[tensor_];
            const uint64_t at = t.offset + filled_;
            if (t.file != s.file || at < s.begin || at >= s.end) {
                return {};
            }
            uint8_t * to = target();
            if (to == nullptr) {
                return without_memory("reserve " + std::to_string(t.bytes) + " bytes for loading '" + t.name + "'");
            }
            const uint64_t n = std::min(t.bytes - filled_, s.end - at);
            std::memcpy(to + filled_, slot(span) + (at - s.begin), n);
            filled_ += n;
            if (filled_ < t.bytes) {
                return {};
            }
            if (!loaded_(t, to)) {
                stopped_ = true;
                return {};
            }
        }
        return {};
    }

    const std::vector<std::shared_ptr<File>> & files_;
    const std::vector<Resident> & tensors_;
    Reader & reader_;
    const ResidentLoaded & loaded_;
    std::vector<Span> spans_;
    Pages staging_, lent_;
    ReadOp ops_[load_depth]; // span i has the places i % load_depth
    iovec segments_[load_depth];
    bool arrived_[load_depth] = {};
    size_t submitted_ = 0; // spans
    size_t tensor_ = 0;    // under way
    uint64_t filled_ = 0;  // bytes of it
    bool stopped_ = false;
};

} // namespace

Result<bool> read_resident(const std::vector<std::shared_ptr<File>> & files, const std::vector<Resident> & tensors,
                           Reader & reader, const ResidentLoaded & loaded) {
    try {
        return ResidentReader(files, tensors, reader, loaded).run();
    } catch (const std::bad_alloc &) {
        return without_memory("load the resident weights");
    }
}

Result<bool> Model::load_resident(const std::vector<Resident> & tensors, const ResidentLoaded & loaded) const {
    try {
        // No faults: a plan counts the reads of decodes.
        Result<std::unique_ptr<Reader>> reader = make_reader(settings_.reader, load_depth, nullptr);
        return reader.ok() ? read_resident(files_, tensors, *reader.value(), loaded) : Result<bool>(reader.status());
    } catch (const std::exception &) { // no thread to read with
        return without_memory("load '" + label_ + "'");
    }
}

} // namespace gguf_flash
