// A bundle in transformers.js, under Node.js.

import path from "node:path";

import { AutoModel, AutoModelForSequenceClassification, AutoTokenizer, env, pipeline } from "@huggingface/transformers";

env.allowRemoteModels = false;

export async function embed({ bundle, texts, pooling, normalize, closeCutTexts = false }) {
  env.localModelPath = path.dirname(bundle);
  const extract = await pipeline("feature-extraction", path.basename(bundle), { dtype: "fp32" });
  if (closeCutTexts) extract.tokenizer = closing(extract.tokenizer);
  const vectors = [];
  for (let start = 0; start < texts.length; start += 8) {
    const pooled = await extract(texts.slice(start, start + 8), { pooling, normalize });
    vectors.push(...pooled.tolist());
  }
  return vectors;
}

// transformers.js 4.3 cuts a long text with its closing [SEP] or </s>; other tools keep that token.
function closing(tokenizer) {
  const closingToken = tokenizer("").input_ids.data.at(-1);
  return (texts, options) => {
    const encoded = tokenizer(texts, options);
    const [rows, width] = encoded.input_ids.dims;
    for (let row = 1; row <= rows && width === tokenizer.model_max_length; ++row) {
      const last = row * width - 1;
      if (encoded.attention_mask.data[last]) encoded.input_ids.data[last] = closingToken;
    }
    return encoded;
  };
}

export async function attend({ bundle, texts }) {
  env.localModelPath = path.dirname(bundle);
  const name = path.basename(bundle);
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModel.from_pretrained(name, { dtype: "fp32", model_file_name: "model_attentions" });
  const outputs = await model(tokenizer(texts, { padding: true, truncation: true }));
  const layers = Object.keys(outputs).filter((output) => output.startsWith("attentions."));
  return layers.map((layer) => outputs[layer].tolist()); // each: texts x heads x tokens x tokens
}

export async function score({ bundle, pairs }) {
  env.localModelPath = path.dirname(bundle);
  const name = path.basename(bundle);
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModelForSequenceClassification.from_pretrained(name, { dtype: "fp32" });
  const [queries, documents] = [pairs.map((pair) => pair[0]), pairs.map((pair) => pair[1])];
  const { logits } = await model(tokenizer(queries, { text_pair: documents, padding: true, truncation: true }));
  return logits.tolist().map(([logit]) => logit);
}
