"""The trainer role: one Megatron world behind one actor; torch here, the bus only in the actor module."""
