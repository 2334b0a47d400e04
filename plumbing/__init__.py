"""The infrastructure behind a run. You can ignore it when you study an algorithm or copy a loss.

answers.py     finds the answer in a text, and compares two answers
args.py        the flags that all scripts share, their ranges, and the start of a script
correction.py  importance weights for the mismatch of sampler and trainer
data.py        datasets, prompts as the model reads them, the stream of training problems
memory.py      estimates a run's memory before it starts
metrics.py     the metrics that are logged
models.py      loads a model, and refuses one whose weights do not fit
packing.py     packs sequences into rows, so that an update computes hardly any padding
policy.py      master weights, the working copy, the copy that samples
ranks.py       communication between the processes of a run
reward.py      loads and calls a user's reward functions
routing.py     records and replays the experts of an MoE
run.py         the run's folder: metrics, checkpoints, resume, signals
settings.py    the settings that must not change when a run is resumed

The names imported here are those that scripts use.
"""

from plumbing import ranks
from plumbing.args import RunArgs, UserError, flag, launch
from plumbing.correction import rollout_correction
from plumbing.memory import plan_memory
from plumbing.metrics import Meter, critic_stats, iteration_metrics
from plumbing.packing import forward_packed
from plumbing.policy import TrainedModel
from plumbing.run import Run
