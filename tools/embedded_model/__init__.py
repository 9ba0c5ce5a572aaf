# SPDX-License-Identifier: Apache-2.0
"""Trains the small English model of this repository: python -m tools.embedded_model --help.

Run from the root of a checkout. texts.py turns books into a tokenizer and token ids, training.py
trains, folder.py writes and checks the HuggingFace folder with its card.
"""
