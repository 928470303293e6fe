"""Text and pixels on the way in and out: tokenizer, chat format, image preprocessing."""
