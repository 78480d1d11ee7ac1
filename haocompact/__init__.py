"""haocompact: compact coding-agent transcripts."""

__version__ = "0.1.0"
