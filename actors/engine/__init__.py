"""The engine role: one SGLang server of its own (or one that is already running), its control, its weight receiver."""
