"""Returns what dead workers held, the moment they are gone."""
