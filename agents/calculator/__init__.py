"""The quick start's task: `ddd+ddd=`, answered by a guess or through a tool. RL changes the habit, not arithmetic."""
