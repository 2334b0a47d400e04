"""What keeps a run on its feet. Nobody has to read it to study an algorithm or to copy a loss.

answers.py     which answer a text gives, and whether two answers are the same
args.py        the flags that all scripts share, the ranges of their values, how a script is started
correction.py  weights for completions that the sampler made in place of the trainer
data.py        datasets, prompts as the model reads them, the stream of training problems
memory.py      what a run will need, computed before it starts
metrics.py     what is logged
models.py      loading a model, and refusing one whose weights do not fit
packing.py     sequences side by side in rows, so that an update computes hardly any padding
policy.py      master weights, the copy that computes, the copy that samples
ranks.py       what several processes do together
reward.py      a reward of the user's own
routing.py     the experts of an MoE: recorded, and replayed
run.py         the run's folder: metrics, checkpoints, resume, signals
settings.py    what shapes a run, and must be the same when it is resumed

Imported here is what scripts use.
"""

from plumbing import ranks
from plumbing.args import RunArgs, UserError, flag, launch
from plumbing.correction import rollout_correction
from plumbing.memory import plan_memory
from plumbing.metrics import Meter, critic_stats, iteration_metrics
from plumbing.packing import forward_packed
from plumbing.policy import TrainedModel
from plumbing.run import Run
