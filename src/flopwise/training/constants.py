"""Defaults of training, and where they come from."""

# The learning rate's peak falls with the model's width (Yang et al. 2022, "Tensor Programs V": 1 / width); 1e-3 at 768, as
# GPT-2's 124M is trained with AdamW, decay 0.1 and clipping; not above 3e-3.
RATE_TIMES_WIDTH = 0.768
HIGHEST_RATE = 3e-3
LONGEST_WARMUP = 500  # steps; of short runs a tenth
SMALL_TEXT_BYTES = 20_000_000  # below it more of the text is held out, so that there is enough to evaluate on
HELD_OUT_OF_SMALL, HELD_OUT = 0.05, 0.01
