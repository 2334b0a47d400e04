#!/usr/bin/env bash
# What only a GPU can show, the most wanted first, in at most 13 minutes: when these are over, the last parts
# are left out.
#
#     pip install -r examples/requirements.txt
#     bash study/on_gpu.sh runs/on_gpu [folder of SmolLM2-135M-Instruct]
#
# The first folder gets the runs and what each part printed. The end of it is shown here, or all of it if the
# part failed. If the first part fails, no other is tried. FROM=7 begins with part 7.
set -u
cd "$(dirname "$0")/.."
out=$1
smollm2=${2:-}
mkdir -p "$out"

total=780 # seconds
number=0
where=$(python -c "import torch; print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}')") || exit 1

part() { # most seconds, title, command
    local limit=$1 title=$2 code log left=$((total - SECONDS))
    shift 2
    number=$((number + 1))
    if [ "$number" -lt "${FROM:-1}" ]; then return; fi
    if [ "$left" -lt 20 ]; then
        echo "== $number. $title: left out"
        return
    fi
    if [ "$limit" -gt "$left" ]; then limit=$left; fi
    echo "== $number. $title ($where; $SECONDS s)"
    log=$out/part-$number.log
    timeout "$limit" "$@" >"$log" 2>&1
    code=$?
    if [ "$code" -eq 0 ]; then
        tail -4 "$log"
        return
    fi
    cat "$log"
    echo "== $number FAILED with exit code $code (124: after $limit s)"
    if [ "$number" -eq 1 ]; then exit 1; fi
}

part 60 "the default command, shortened" \
    python grpo.py --iterations 2 --num_held_out 16 --run_dir "$out/grpo"
# A capture that fails would be felt first by ppo, which makes its critic after the check at loading.
part 60 "ppo in bfloat16" python ppo.py --iterations 2 --num_held_out 16 --dtype bfloat16 --run_dir "$out/ppo"
part 120 "graphs: captures, fixed and growing cache, no step waits" \
    python -m pytest -n 0 -s -m slow tests/test_gpu.py -k "not learns"

rows="--prompts_per_iteration 32 --group_size 8 --max_new_tokens 256 --num_minibatches 4 --kl_coef 0"
part 90 "tokens/s of the sampler and of generate(): asked for 5 times" \
    python study/speed.py sampler --model qwen --pairs 5 --flags "$rows --dtype bfloat16"
part 60 "memory of README's command: asked for less than 22 GiB reserved" \
    python study/speed.py memory --model qwen --flags "--max_new_tokens 400 --num_minibatches 4 \
    --kl_coef 0 --dtype bfloat16 --gradient_checkpointing --micro_batch_tokens 16384"
part 150 "seconds of an iteration and of TRL's: asked for 0.25" \
    python study/speed.py trl --model qwen --pairs 3 --flags "$rows --dtype bfloat16" \
    --ours "--micro_batch_tokens 32768 --gradient_checkpointing" --theirs "--per_device_train_batch_size 16"
part 120 "every script learns and resumes" python -m pytest -n 4 -m slow tests/test_gpu.py -k learns
if [ -n "$smollm2" ]; then
    part 300 "a real model learns sums below 100" \
        python grpo.py --model "$smollm2" --dtype bfloat16 --lr 5e-6 --kl_coef 0 --max_new_tokens 64 \
        --num_minibatches 4 --iterations 60 --num_held_out 128 --dataset examples/own_dataset.py:sums \
        --run_dir "$out/smollm2"
    part 20 "its curve" python study/curves.py "$out/smollm2" --out "$out/smollm2.png"
fi
part 120 "the default tests" python -m pytest -n 8
echo "== done ($SECONDS s)"
