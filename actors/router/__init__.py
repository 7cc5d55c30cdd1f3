"""An sglang-router that is started here, in front of the engines of one group."""
