"""Whole models against eager: the zoo, dynamic shapes, and what else people do with a model."""
