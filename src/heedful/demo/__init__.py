"""The main job on real input: train a small character-level GPT with heedful's attention, and the
same one with PyTorch's, and see that they agree."""
