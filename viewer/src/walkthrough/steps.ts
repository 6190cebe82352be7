// The eight steps from tokens to the output of a layer: explanation, numbers of the selected token, and charts.
import type { Table } from "../color";
import { element, short } from "../dom";
import { counted, percentText, plainText, signedText } from "../numbers";
import { weightScale } from "../scales";
import { largest } from "../units";
import { dot, entropy, isMasked, norm, otherScale, outputOf, rowOf, sharesOf, softmax, vectorOf, type Layer, type Row } from "./attention";
import { maskChart, softmaxCurve, tokenList, vectorChart, weightStrip, type Item } from "./charts";
import type { LayerData, WalkthroughData } from "./data";
import { isUnchanged, type State } from "./state";

/** The selected token in the selected head, with everything that the steps show. */
export interface Context {
  data: WalkthroughData;
  state: State;
  described: LayerData;
  layer: Layer;
  row: Row;
  agreement: () => number; // largest difference from the weights of the model
  table: Table;
  choose(head: number): void;
}

export interface Step {
  name: string;
  title: string;
  formula: (context: Context) => string;
  text: (context: Context) => string[];
  fact: (context: Context) => string;
  picture: (context: Context) => Element[];
}

function quoted({ data }: Context, token: number): string {
  return `“${label(data, token)}”`;
}

function label(data: WalkthroughData, token: number): string {
  return short(data.tokens[token].shown ?? data.tokens[token].text);
}

function vector({ data, layer, state }: Context, name: "query" | "key" | "value", token: number): Float32Array {
  const size = name === "value" ? layer.valueSize : layer.keySize;
  return vectorOf(layer[name], size, data.tokens.length, state.head, token);
}

function infinite(value: number): string {
  return value === -Infinity ? "−∞" : signedText(value);
}

/** Return the length of an axis that contains 0 and all values. */
function extentOf(values: number[]): number {
  return Math.max(0, ...values) - Math.min(0, ...values) || 1;
}

/** List a value for each token, with bars on a common axis. */
function list(context: Context, title: string, values: number[], format: (value: number) => string = infinite): HTMLElement {
  const extent = extentOf(values.filter(Number.isFinite));
  const items = values.map((value, token): Item => {
    return { name: label(context.data, token), text: format(value), bar: Number.isFinite(value) ? value / extent : 0 };
  });
  return figure(title, tokenList(title, items, context.state.token));
}

function figure(title: string, ...charts: Element[]): HTMLElement {
  const caption = element("figcaption", {}, title);
  return element("figure", {}, caption, ...charts);
}

function vectorFigure(title: string, values: ArrayLike<number>): HTMLElement {
  const numbers = Array.from(values, (value) => plainText(value, 2));
  const [low, high] = [Math.min(...Array.from(values)), Math.max(...Array.from(values))].map((value) => plainText(value, 2));
  const details = element("details", {}, element("summary", {}, counted(values.length, "number")), element("p", {}, numbers.join(", ")));
  const description = `${title}: ${counted(values.length, "value")} from ${low} to ${high}`;
  return figure(`${title}, from ${low} to ${high}`, vectorChart(description, values), details);
}

const TOLERANCE = 1e-4; // rounding of float32

function range(values: number[]): number {
  return Math.max(...values) - Math.min(...values);
}

function weight(value: number): string {
  return value > 0 && value < 0.0005 ? "< 0.001" : value === 0 ? "0" : value.toFixed(3);
}

const TOKENS: Step = {
  name: "Tokens",
  title: "The text becomes tokens",
  formula: ({ data }) => `text → ${counted(data.tokens.length, "token")}`,
  text: () => [
    "The tokenizer splits the text into tokens. A word can be one token or several. Special tokens are added by the tokenizer and take part in attention like all others.",
    "From here on, the page follows the selected token in the selected layer and head. Select another one at any time.",
  ],
  fact: (context) => {
    const { data, state } = context;
    const special = data.tokens.filter((token) => token.special).length;
    return `${counted(data.tokens.length, "token")}, of which ${special} special. ${quoted(context, state.token)} is token ${state.token} and has the id ${data.ids[state.token]} in the vocabulary.`;
  },
  picture: ({ data, state }) => {
    const items = data.tokens.map((token, index): Item => ({ name: short(token.text), text: `id ${data.ids[index]}`, bar: 0 }));
    return [figure("Tokens, counted from 0", tokenList("Tokens", items, state.token))];
  },
};

const VECTORS: Step = {
  name: "q, k, v",
  title: "Query, key and value",
  formula: () => "q = x·W_Q    k = x·W_K    v = x·W_V    (plus biases, if the model has them)",
  text: ({ described }) => [
    "Each head multiplies the vector x of a token by three learned matrices. The query is compared with the keys of all tokens. The result decides how much of the value of each token is taken.",
    ...(described.isRotated ? ["This model uses rotary position embeddings: query and key are shown after the rotation by the position of the token."] : []),
  ],
  fact: (context) => {
    const { data, described, state } = context;
    const [q, k, v] = (["query", "key", "value"] as const).map((name) => plainText(norm(vector(context, name, state.token)), 2));
    return `x has ${data.hiddenSize} values. In head ${state.head}, q and k have ${described.keySize} values each and v has ${described.valueSize}. Lengths for ${quoted(context, state.token)}: |q| = ${q}, |k| = ${k}, |v| = ${v}.`;
  },
  picture: (context) =>
    (["query", "key", "value"] as const).map((name) =>
      vectorFigure(`${name[0]}, the ${name} of ${quoted(context, context.state.token)}`, vector(context, name, context.state.token)),
    ),
};

const SCORES: Step = {
  name: "Products",
  title: "Products: the query times every key",
  formula: () => "q · k(j) = q₁·k₁(j) + q₂·k₂(j) + … = |q| · |k(j)| · cosine",
  text: (context) => [
    `The query of ${quoted(context, context.state.token)} is multiplied by the key of every token, component by component, and the results are added. This product is large if both vectors are long and point in similar directions. It is negative if they point in opposite directions, and 0 if they are perpendicular.`,
    "Query and key come from different matrices. The product is therefore not a similarity of two words, and that of a token with itself is not always the largest.",
  ],
  fact: (context) => {
    const { row, state } = context;
    const [best] = largest(row.products, 1);
    const [q, k] = [vector(context, "query", state.token), vector(context, "key", best)];
    const cosine = dot(q, k) / (norm(q) * norm(k) || 1);
    return `Largest product: q·k = ${plainText(row.products[best], 2)} for ${quoted(context, best)}, which is |q| ${plainText(norm(q), 2)} × |k| ${plainText(norm(k), 2)} × cosine ${plainText(cosine, 2)}.`;
  },
  picture: (context) => [list(context, `q · k of ${quoted(context, context.state.token)} with each token`, context.row.products)],
};

const SCALING: Step = {
  name: "Scaling",
  title: "Scaling by 1/√d_k",
  formula: ({ described, state, layer }) => `score = ${plainText(state.scaled ? layer.scale : otherScale(layer), 4)} · q·k${described.hasBias ? " + bias" : ""}`,
  text: ({ described }) => {
    const root = 1 / Math.sqrt(described.keySize);
    const reason = `A sum of d_k = ${described.keySize} terms grows with d_k. Large scores make the softmax put nearly all weight on one token, and then training gets almost no gradient.`;
    const factor =
      described.scale === 1
        ? "This layer does not scale its scores: it was trained without."
        : Math.abs(described.scale / root - 1) < 1e-3
          ? `The factor 1/√d_k = ${plainText(root, 4)} compensates for this. The result is the score of the key.`
          : `This layer uses the factor ${plainText(described.scale, 4)}; 1/√d_k would be ${plainText(root, 4)}.`;
    const bias = described.hasBias ? ["This layer also adds a bias that depends only on the positions of the two tokens."] : [];
    return [`${reason} ${factor}`, ...bias];
  },
  fact: ({ row, layer, described }) => {
    const top = (scale: number): string => weight(Math.max(...softmax(row.products.map((product, token) => scale * product + row.bias[token]))));
    const [model, other] = [layer.scale, otherScale(layer)];
    const names = described.scale === 1 ? ["as trained, without scaling", "with 1/√d_k"] : ["with scaling", "without"];
    const width = (scale: number): string => plainText(Math.abs(scale) * range(row.products), 1);
    return `The products span ${width(model)} ${names[0]} and ${width(other)} ${names[1]}. The largest weight of the row is ${top(model)} and ${top(other)}.`;
  },
  picture: (context) => {
    const { row, described } = context;
    const pictures = [list(context, described.hasBias ? "Scaled products, before the bias" : "Scores after this step", row.scaled)];
    const bias = row.bias.map((value) => (value === -Infinity ? 0 : value)); // masks are part of the next step
    if (described.hasBias) pictures.push(list(context, "Position bias, which is added", bias));
    return pictures;
  },
};

const MASK: Step = {
  name: "Mask",
  title: "The mask removes keys",
  formula: () => "score(j) = −∞ for each masked key j,  and  e^−∞ = 0",
  text: ({ row }) => [
    "A masked key gets the score −∞, so its weight becomes exactly 0. A causal mask hides all later tokens, as in models that predict the next token. A padding mask hides tokens that only fill up a batch.",
    row.bias.includes(-Infinity)
      ? "This layer has a mask of its own, which stays in effect: a causal mask or a window of neighbors."
      : "The model computed this text without a mask: every token can attend to every other.",
  ],
  fact: (context) => {
    const { row, state, data } = context;
    const masked = row.scores.filter((score) => score === -Infinity).length;
    return `${masked} of ${data.tokens.length} scores of ${quoted(context, state.token)} are −∞${masked === data.tokens.length ? ": no key is left, so all weights are 0" : ""}.`;
  },
  picture: (context) => {
    const { data, state, layer, row } = context;
    const size = data.tokens.length;
    const masked = (query: number, key: number): boolean =>
      isMasked(state, size, query, key) || (layer.bias !== null && layer.bias[(state.head * size + query) * size + key] === -Infinity);
    let count = 0;
    for (let query = 0; query < size; query++) for (let key = 0; key < size; key++) count += masked(query, key) ? 1 : 0;
    const description = `Mask: ${count} of ${size * size} pairs are masked`;
    const grid = figure("Rows are queries, columns are keys. Gray cells are masked.", maskChart(description, size, masked, state.token));
    return [element("div", { class: "pair" }, grid, list(context, "Scores after the mask", row.scores))];
  },
};

/** Compare the weights with those of the model, unless the reader changed the options. */
function agreementText({ state, agreement }: Context): string {
  if (!isUnchanged(state)) return "";
  const difference = agreement();
  const verb = difference <= TOLERANCE ? "agree" : "disagree";
  return ` This page and the model ${verb}: the weights of layer ${state.layer} differ by at most ${difference.toExponential(1)}.`;
}

const SOFTMAX: Step = {
  name: "Softmax",
  title: "Softmax: scores become weights",
  formula: () => "weight(j) = e^(score(j)/τ) / Σ e^(score/τ)",
  text: () => [
    "The exponential makes all scores positive, and dividing by their sum makes the weights add up to 1. Only differences between scores matter.",
    "Models use the temperature τ = 1. A lower temperature moves weight to the largest score, a higher one spreads it more evenly.",
  ],
  fact: (context) => {
    const { row } = context;
    const [best] = largest(row.weights, 1);
    const open = row.scores.filter((score) => score > -Infinity).length;
    if (!open) return "No key is left, so there are no weights.";
    const nats = entropy(row.weights);
    const sum = row.weights.reduce((total, value) => total + value, 0);
    return `Largest weight: ${weight(row.weights[best])} on ${quoted(context, best)}. Sum: ${sum.toFixed(6)}. Entropy: ${plainText(nats, 2)} of at most ln ${open} = ${plainText(Math.log(open), 2)}, as for ${plainText(Math.exp(nats), 1)} equal weights.${agreementText(context)}`;
  },
  picture: (context) => {
    const { row, state } = context;
    const rows = list(context, `Attention weights of ${quoted(context, state.token)}`, row.weights, weight);
    if (!row.weights.some((value) => value > 0)) return [rows];
    const curve = softmaxCurve("Weights rise exponentially with the scores", row.scores, row.weights, state.temperature);
    return [element("div", { class: "pair" }, figure("Weight by score. Each dot is a token.", curve), rows)];
  },
};

const VALUES: Step = {
  name: "Values",
  title: "The weighted sum of the values",
  formula: () => "o = Σ weight(j) · v(j)",
  text: () => [
    "The value of each token is multiplied by its weight, and the results are added. The sum o is the output of the head for this token.",
    "The share of a token is the part of o that its weighted value accounts for (the projection on o). Shares add up to 100 % and can be negative. A large weight on a short value contributes little, so weights alone do not show what a token takes over.",
  ],
  fact: (context) => {
    const { data, layer, row, state } = context;
    const shares = sharesOf(layer, data.tokens.length, state.head, row.weights);
    const [best] = largest(row.weights, 1);
    const output = norm(outputOf(layer, data.tokens.length, state.head, row.weights));
    return `${quoted(context, best)} has ${percentText(row.weights[best])} of the weight and a share of ${percentText(shares[best])} of the output. Its value has the length ${plainText(norm(vector(context, "value", best)), 2)}, the output ${plainText(output, 2)}.`;
  },
  picture: (context) => {
    const { data, layer, row, state } = context;
    const shares = sharesOf(layer, data.tokens.length, state.head, row.weights);
    const extent = extentOf(shares);
    const items = shares.map((share, token): Item => {
      const sign = share < -0.005 ? "−" : "";
      return { name: label(data, token), text: `${sign}${percentText(Math.abs(share))}`, bar: share / extent, note: `weight ${weight(row.weights[token])}` };
    });
    const output = outputOf(layer, data.tokens.length, state.head, row.weights);
    const title = "Share of each token in the output";
    return [figure(title, tokenList(title, items, state.token)), vectorFigure("o, the output of the head", output)];
  },
};

const HEADS: Step = {
  name: "Heads",
  title: "All heads of the layer",
  formula: ({ described }) => `[o(0), …, o(${described.heads - 1})] · W_O  → added to x`,
  text: ({ described }) => [
    `All ${described.heads} heads do the same with their own matrices, and see the same tokens. Their outputs are concatenated. The output projection W_O then mixes them, and the result is added to x.`,
    "Select a head to follow it through the steps.",
  ],
  fact: (context) => {
    const { described, state } = context;
    const { heads, valueSize } = described;
    const outputs = headOutputs(context);
    const squares = outputs.map((output) => dot(output, output));
    const share = squares[state.head] / (squares.reduce((sum, square) => sum + square, 0) || 1);
    return `${heads} heads × ${valueSize} values = ${heads * valueSize} values. Head ${state.head} fills values ${state.head * valueSize} to ${(state.head + 1) * valueSize - 1}, with ${percentText(share)} of the squared length.`;
  },
  picture: (context) => {
    const { data, state, layer, described, table } = context;
    const legend = weightScale();
    legend.draw(table);
    const rows = Array.from({ length: layer.heads }, (_, head) => {
      const { weights } = rowOf(layer, data.tokens.length, head, state.token, state);
      const [best] = largest(weights, 1);
      const pressed = String(head === state.head);
      const button = element("button", { type: "button", class: "toggle", "aria-pressed": pressed, "data-key": `head-${head}` }, `Head ${head}`);
      button.addEventListener("click", () => context.choose(head));
      const top = `${weight(weights[best])} ${label(data, best)}`;
      return element("li", {}, button, weightStrip(`Weights of head ${head}`, weights, table), element("span", { class: "number", dir: "auto" }, top));
    });
    const all = Float64Array.from(headOutputs(context).flatMap((output) => Array.from(output)));
    const marked: [number, number] = [state.head * described.valueSize, (state.head + 1) * described.valueSize];
    const title = `Concatenation of the ${counted(layer.heads, "output")}, head ${state.head} marked`;
    return [
      figure(`Weights of ${quoted(context, state.token)} in each head, and the largest one`, element("ul", { class: "head-list" }, ...rows), legend.element),
      figure(title, vectorChart(title, all, marked)),
    ];
  },
};

function headOutputs({ data, layer, state }: Context): Float64Array[] {
  const size = data.tokens.length;
  return Array.from({ length: layer.heads }, (_, head) => outputOf(layer, size, head, rowOf(layer, size, head, state.token, state).weights));
}

export const STEPS: Step[] = [TOKENS, VECTORS, SCORES, SCALING, MASK, SOFTMAX, VALUES, HEADS];
