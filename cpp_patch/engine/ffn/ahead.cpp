#include "ahead.h"

#include "reads.h"

#include <algorithm>

namespace gguf_flash {

struct Ahead::Piece {
    ReadOp op;
    std::vector<iovec> segments;
    std::vector<uint32_t> neurons;
    LayerState * state = nullptr;
};

Ahead::Ahead(std::unique_ptr<Reader> reader) : reader_(std::move(reader)) {
    if (std::string(reader_->name()) == "io_uring") {
        feeder_ = std::make_unique<Feeder>([this] { return feed(); });
    }
}

Ahead::~Ahead() {
    if (pid_ != getpid()) {
        reader_.release(); // its ring and its threads are the parent's
    }
}

bool Ahead::able() {
    std::lock_guard<std::mutex> lock(mutex_);
    leave_parent();
    return reader_ != nullptr;
}

void Ahead::read(LayerState & state, const std::vector<uint32_t> & neurons) {
    std::lock_guard<std::mutex> lock(mutex_);
    plan_runs(state, neurons, state.runs_ahead);
    for (ReadRun run : state.runs_ahead) {
        if (!submit(state, neurons, run)) {
            for (uint32_t i = run.first; i < run.first + run.count; ++i) {
                state.arrived.push_back({ neurons[i], false }); // their layer reads them when it needs them
            }
        }
    }
    reader_->flush();
    if (feeder_ != nullptr) {
        feeder_->wake();
    }
}

// Whether something is still under way.
bool Ahead::feed() {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) { // whoever has it feeds the ring, too, or waits for a disk: no fork may wait for that
        return true;
    }
    collect(false);
    return in_flight_ > 0;
}

// False where there is no memory for it.
bool Ahead::submit(LayerState & state, const std::vector<uint32_t> & neurons, ReadRun run) {
    Piece * piece = nullptr;
    try {
        piece = &spare_piece();
        piece->state = &state;
        piece->neurons.assign(neurons.begin() + run.first, neurons.begin() + run.first + run.count);
        piece->segments.resize(std::max(piece->segments.size(), size_t(run_segments(neurons, run))));
        const uint64_t bytes = describe_run(state, neurons, run, piece->segments.data(), piece->op);
        piece->op.owner = piece;
        reader_->submit(&piece->op);
        state.counters.bytes_read += bytes;
    } catch (const std::bad_alloc &) {
        if (piece != nullptr) {
            spare_.push_back(piece);
        }
        return false;
    }
    state.counters.requests += 1;
    ++state.reads_ahead;
    ++in_flight_;
    return true;
}

void Ahead::take(LayerState & state, std::vector<Arrival> & arrived, bool wait) {
    arrived.clear();
    std::lock_guard<std::mutex> lock(mutex_);
    leave_parent();
    collect(false);
    if (state.arrived.empty() && wait) {
        collect(true);
    }
    arrived = state.arrived; // a copy: what is reserved there stays there
    state.arrived.clear();
}

void Ahead::enlist(const std::vector<std::shared_ptr<File>> & files, const std::vector<iovec> & memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    leave_parent();
    if (reader_ != nullptr) {
        reader_->enlist(files, memory);
    }
}

void Ahead::settle(LayerState & state) {
    std::lock_guard<std::mutex> lock(mutex_);
    leave_parent();
    while (state.reads_ahead > 0) {
        collect(true);
    }
    state.arrived.clear();
}

void Ahead::collect(bool wait) {
    constexpr size_t batch = 64;
    ReadOp * done[batch];
    size_t n = batch;
    while (in_flight_ > 0 && n == batch) {
        n = wait ? reader_->wait(done, batch) : reader_->poll(done, batch);
        in_flight_ -= n;
        for (size_t i = 0; i < n; ++i) {
            finish(*static_cast<Piece *>(done[i]->owner), done[i]->error == 0);
        }
        wait = false;
    }
}

void Ahead::finish(Piece & piece, bool ok) {
    --piece.state->reads_ahead;
    for (uint32_t neuron : piece.neurons) {
        piece.state->arrived.push_back({ neuron, ok });
    }
    spare_.push_back(&piece);
}

Ahead::Piece & Ahead::spare_piece() {
    if (spare_.empty()) {
        spare_.reserve(pieces_.size() + 1); // putting one back must not fail
        pieces_.push_back(std::make_unique<Piece>());
        return *pieces_.back();
    }
    Piece * piece = spare_.back();
    spare_.pop_back();
    return *piece;
}

// In a fork's child: the reads under way belong to the parent, and their bytes will not come here. From
// now on nothing is read ahead.
void Ahead::leave_parent() {
    if (pid_ == getpid()) {
        return;
    }
    reader_.release();
    pid_ = getpid();
    for (const std::unique_ptr<Piece> & piece : pieces_) {
        if (std::find(spare_.begin(), spare_.end(), piece.get()) == spare_.end()) {
            finish(*piece, false);
        }
    }
    in_flight_ = 0;
}

} // namespace gguf_flash
