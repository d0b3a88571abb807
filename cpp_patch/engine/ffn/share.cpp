#include "share.h"

#include <algorithm>

namespace gguf_flash {

namespace {

// A straight piece of a layer's curve, made convex: misses avoided by a byte, from slots begin to end.
struct Segment {
    double gain;
    size_t layer;
    uint32_t begin, end;
};

// The curve from no slot to the whole layer. Points in no order or beyond the layer, and misses that grow
// with the slots, as damaged files have them, are put right.
std::vector<MissPoint> whole_curve(const LayerLayout & layer) {
    std::vector<MissPoint> measured = layer.misses;
    std::sort(measured.begin(), measured.end(), [](const MissPoint & a, const MissPoint & b) {
        return a.slots != b.slots ? a.slots < b.slots : a.misses < b.misses;
    });
    double share = layer.selected;
    for (const MissPoint & p : measured) { // what the smallest cache misses is the most that is known
        share = layer.selected < 0 ? std::max(share, p.misses / layer.n_ff) : share;
    }
    double low = std::min(std::max(share * layer.n_ff, 0.0), double(layer.n_ff));
    std::vector<MissPoint> points = { { 0, low } };
    for (const MissPoint & p : measured) {
        low = std::min(low, p.misses);
        if (points.back().slots < p.slots && p.slots < layer.n_ff) {
            points.push_back({ p.slots, low });
        }
    }
    points.push_back({ layer.n_ff, 0.0 });
    return points;
}

// The lower convex hull: along it each slot gains no more than the one before.
std::vector<MissPoint> hull(const std::vector<MissPoint> & points) {
    std::vector<MissPoint> kept;
    for (const MissPoint & p : points) {
        while (kept.size() > 1) {
            const MissPoint &a = kept[kept.size() - 2], &b = kept.back();
            if ((b.misses - a.misses) * (double(p.slots) - a.slots) <
                (p.misses - a.misses) * (double(b.slots) - a.slots)) {
                break;
            }
            kept.pop_back();
        }
        kept.push_back(p);
    }
    return kept;
}

std::vector<Segment> segments_of(const std::vector<LayerLayout> & layers, const std::vector<uint64_t> & slot_bytes,
                                 const std::vector<uint32_t> & slots) {
    std::vector<Segment> found;
    for (size_t i = 0; i < layers.size(); ++i) {
        const std::vector<MissPoint> points = hull(whole_curve(layers[i]));
        for (size_t k = 1; k < points.size(); ++k) {
            const MissPoint &a = points[k - 1], &b = points[k];
            if (b.misses < a.misses && b.slots > slots[i]) {
                const double gain = (a.misses - b.misses) / (double(b.slots) - a.slots) / double(slot_bytes[i]);
                found.push_back({ gain, i, std::max(a.slots, slots[i]), b.slots });
            }
        }
    }
    std::sort(found.begin(), found.end(), [](const Segment & a, const Segment & b) {
        return a.gain != b.gain ? a.gain > b.gain : a.layer != b.layer ? a.layer < b.layer : a.begin < b.begin;
    });
    return found;
}

// Moves slots toward wanted, the same share of the way for every layer; false if not all the way.
bool share_evenly(const std::vector<uint32_t> & wanted, const std::vector<uint64_t> & slot_bytes,
                  std::vector<uint32_t> & slots, uint64_t & spare) {
    uint64_t most = 0, used = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
        most += slot_bytes[i] * (wanted[i] - slots[i]);
    }
    const double share = most == 0 ? 0.0 : std::min(1.0, double(spare) / double(most));
    for (size_t i = 0; i < slots.size(); ++i) {
        const uint32_t more = uint32_t(share * (wanted[i] - slots[i]));
        slots[i] += more;
        used += slot_bytes[i] * more;
    }
    const bool enough = spare >= most;
    spare -= std::min(spare, used);
    return enough;
}

} // namespace

std::vector<uint32_t> share_slots(const std::vector<LayerLayout> & layers, const std::vector<uint64_t> & slot_bytes,
                                  uint64_t spare) {
    std::vector<uint32_t> slots, window, all;
    bool curves = true;
    for (const LayerLayout & l : layers) {
        slots.push_back(std::min(l.n_ff, least_slots));
        window.push_back(std::max(slots.back(), std::min(l.n_ff, l.capacity)));
        all.push_back(l.n_ff);
        curves = curves && !l.misses.empty();
    }
    if (curves) {
        for (const Segment & s : segments_of(layers, slot_bytes, slots)) {
            if (slots[s.layer] == s.begin) { // else the segment before it did not fit whole
                const uint64_t more = std::min<uint64_t>(s.end - s.begin, spare / slot_bytes[s.layer]);
                slots[s.layer] += uint32_t(more);
                spare -= more * slot_bytes[s.layer];
            }
        }
    } else if (!share_evenly(window, slot_bytes, slots, spare)) {
        return slots; // what rounding left over would all go to the largest layers
    }
    share_evenly(all, slot_bytes, slots, spare);
    return slots;
}

} // namespace gguf_flash
