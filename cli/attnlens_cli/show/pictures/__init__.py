"""Attention maps as pictures: PNG, SVG and PDF, by matplotlib without pyplot."""
