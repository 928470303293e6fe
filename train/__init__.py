"""How the bundled checkpoint is made: corpus, vocabulary, exercises, training."""
