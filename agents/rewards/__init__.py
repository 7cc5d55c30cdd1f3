"""Ready-made rewards: functions of what the policy said and of its task's row. docs/rewards.md lists them."""
