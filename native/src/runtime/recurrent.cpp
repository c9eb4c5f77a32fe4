// A runner's part in the states of recurrent layers: where they live, and when they change.
#include "graph/recurrent/branch.h"
#include "runtime/batch_runner.h"

namespace lkv {
namespace {

constexpr int32_t snapshot_distance = 2048;  // tokens from one copy of a recurrent state to the next

}  // namespace

void BatchRunner::attach_states() {
    std::vector<StateMemory*> memories;
    for (PipelineStage& stage : stages_) {
        if (stage.on_gpu()) check_gpu_takes(*model_.hparams().recurrence);
        stage.states = std::make_unique<StateTensors>(model_.hparams(), stage.run, cache_->states().n_slots(),
                                                      model_.memory(stage.run));
        if (stage.on_gpu()) {
            stage.states->copy_by([gpu = stage.gpu.get()](auto pieces) { return gpu->copy(pieces); });
            // of one sequence, and the one that is made before an older one goes
            constexpr size_t n = SequenceState::copies_of_sequence + 1;
            if (stage.states->slot_bytes() > 0) stage.gpu->reserve_copies(n, stage.states->slot_bytes());
        }
        memories.push_back(stage.states.get());
    }
    cache_->states().attach(memories);
}

void BatchRunner::claim_states(std::span<const int32_t> seq, const EqualRuns& runs, int n_guesses) {
    std::vector<int32_t> each;
    for (size_t i = 0; i < seq.size(); i += runs.n_each()) each.push_back(seq[i]);
    step_ = cache_->states().claim(each, n_guesses);
}

void BatchRunner::commit_states(std::span<const int32_t> pos, const EqualRuns& runs) {
    std::vector<int32_t> ends;
    for (size_t i = runs.n_each(); i <= pos.size(); i += runs.n_each()) ends.push_back(pos[i - 1] + 1);
    cache_->states().commit(step_, ends);
}

// After a ubatch: copies of its sequences' states where they may be wanted again.
void BatchRunner::keep_snapshots(const EqualRuns& ubatch) {
    SequenceState& states = cache_->states();
    for (const int32_t seq : step_.seq) {
        if (ubatch.ends_prompt || states.since_copy(seq) >= snapshot_distance) states.keep_copy(seq);
    }
}

}  // namespace lkv
