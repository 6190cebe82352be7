"""A graph of the embeddings in fp16: conversion, measurement, result."""
