"""PEFT adapters over a base model: which kinds can be measured, how they are loaded, when the base is shared."""
