// Private to ffn/: reads that are under way before the call that needs them.
#pragma once

#include "feeder.h"
#include "gguf_flash/reader.h"

#include <unistd.h>

#include <mutex>

namespace gguf_flash {

struct LayerState;
struct Arrival;
struct ReadRun;

// Reads bundles into slots of a layer that runs later: with the device while other layers compute.
// One for each model, shared by its contexts. A layer's lock is held by whoever calls on its behalf.
class Ahead {
public:
    explicit Ahead(std::unique_ptr<Reader> reader);
    ~Ahead();

    // False in a fork's child, which has no reader.
    bool able();
    // able() must be true. Begins to read neurons, ascending, whose slots the layer's cache has pinned.
    void read(LayerState & state, const std::vector<uint32_t> & neurons);
    // Moves what has arrived for the layer to arrived. wait: blocks for a read, of any layer, if
    // nothing has arrived and some are under way.
    void take(LayerState & state, std::vector<Arrival> & arrived, bool wait);
    // Reader::enlist; nothing may be under way for any layer.
    void enlist(const std::vector<std::shared_ptr<File>> & files, const std::vector<iovec> & memory);
    // Waits until nothing is under way for the layer, and forgets what arrived. Allocates nothing.
    void settle(LayerState & state);

private:
    struct Piece; // one read

    bool submit(LayerState & state, const std::vector<uint32_t> & neurons, ReadRun run);
    Piece & spare_piece();
    void collect(bool wait);
    void finish(Piece & piece, bool ok);
    bool feed();
    void leave_parent();

    std::mutex mutex_; // guards all below, and LayerState::arrived
    int pid_ = getpid();
    std::vector<std::unique_ptr<Piece>> pieces_;
    std::vector<Piece *> spare_;
    size_t in_flight_ = 0;
    std::unique_ptr<Reader> reader_; // it may still write when it goes
    std::unique_ptr<Feeder> feeder_; // of a ring, which hands nothing on by itself; the first to go
};

} // namespace gguf_flash
