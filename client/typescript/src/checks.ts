// Validation of responses. The address may belong to another program, and a proxy may change responses.
import { BadResponseError } from "./errors.js";
import { Tensor, type TypedArray } from "./tensor.js";

type Fields = Record<string, unknown>;

/** Expected length of each axis. Null matches any. */
type Shape = readonly (number | null)[];

const MAX_SHOWN = 200; // characters of a value in a message

function check(condition: boolean, problem: string): asserts condition {
  if (!condition) throw new BadResponseError(`invalid response: ${problem}`);
}

function shown(value: unknown): string {
  return `${value instanceof Tensor ? `a tensor of shape [${value.shape}]` : JSON.stringify(value)}`.slice(0, MAX_SHOWN);
}

/** Check that a value is an object. */
export function checkObject(value: unknown, name = "the response"): asserts value is Fields {
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Tensor);
  check(isObject, `${name} is ${shown(value)}, expected an object`);
}

/** Return a value that must be a list of objects. */
export function checkedObjects(value: unknown, name: string, count?: number): Fields[] {
  check(Array.isArray(value), `${name} is ${shown(value)}, expected a list`);
  check(count === undefined || value.length === count, `there are ${value.length} ${name}, expected ${count}`);
  value.forEach((item, index) => checkObject(item, `${name}[${index}]`));
  return value as Fields[];
}

/** Return a value that must be a tensor of finite numbers. With `gaps`, numbers may be NaN. */
export function checkedTensor(value: unknown, name: string, shape: Shape, { type, gaps = false }: { type?: Function; gaps?: boolean } = {}): Tensor {
  check(value instanceof Tensor, `${name} is ${shown(value)}, expected a tensor`);
  const matches = value.shape.length === shape.length && shape.every((length, axis) => length === null || length === value.shape[axis]);
  check(matches, `${name} has shape [${value.shape}], expected [${shape.map((length) => length ?? "any")}]`);
  check(type === undefined || value.data.constructor === type, `${name} has elements of ${value.data.constructor.name}, expected ${type?.name}`);
  checkFinite(value, name, gaps);
  return value;
}

function checkFinite({ data }: Tensor, name: string, gaps: boolean): void {
  if (!(data instanceof Float32Array)) return;
  const isInvalid = gaps ? (number: number) => Math.abs(number) === Infinity : (number: number) => !Number.isFinite(number);
  check(!data.some(isInvalid), `${name} has a number that is not finite`);
}

function checkedNumber(value: unknown, name: string): number {
  check(Number.isFinite(value), `${name} is ${shown(value)}, expected a number`);
  return value as number;
}

/** Return an index or a count, which must be less than `limit`. */
function checkedIndex(value: unknown, name: string, limit = Infinity): number {
  check(Number.isInteger(value) && (value as number) >= 0 && (value as number) < limit, `${name} is ${shown(value)}, which is out of range`);
  return value as number;
}

/** Check the model and the number of tokens of each text. */
export function checkUsages(response: Fields, count: number): void {
  check(typeof response.model === "string", "the response has no model");
  for (const usage of checkedObjects(response.usages, "usages", count)) checkedIndex(usage.num_tokens, "num_tokens");
}

/** Check one embedding for each text. */
export function checkEmbeddings(response: Fields, count: number, type: Function): TypedArray[] {
  const { rows } = checkedTensor(response.embeddings, "embeddings", [count, null], { type });
  checkUsages(response, count);
  return rows;
}

/** Check tokens, token vectors and attention of a text. */
export function checkEncodedText(text: Fields): void {
  const { length } = checkedObjects(text.tokens, "tokens");
  if (text.last_hidden_state !== undefined) checkedTensor(text.last_hidden_state, "last_hidden_state", [length, null]);
  for (const result of checkedObjects(text.attention ?? [], "attention")) checkAttention(result, length);
}

/** Check the attention of a text with this number of tokens, or of any number. */
export function checkAttention(result: Fields, numTokens: number | null): void {
  for (const name of ["layers", "heads"]) {
    const list = result[name];
    check(Array.isArray(list) && list.every(Number.isInteger), `${name} is ${shown(list)}, expected a list of integers`);
  }
  const units = checkUnits(result.unit_ids, numTokens);
  const forms = {
    dense: [null, null, null, units],
    sqrt_uint8: [null, null, null, units],
    per_token: [null, numTokens, null],
    band: [null, null, numTokens, null],
    blocks: [null, null, numTokens, null],
  };
  for (const [name, shape] of Object.entries(forms)) {
    if (result[name] !== undefined) checkedTensor(result[name], name, shape);
  }
  const groups = ["top_k", "sparse", "statistics"].filter((name) => result[name] !== undefined);
  for (const group of groups) {
    checkObject(result[group], group);
    for (const [name, value] of Object.entries(result[group])) {
      check(value instanceof Tensor, `${group}.${name} is ${shown(value)}, expected a tensor`);
      checkFinite(value, `${group}.${name}`, false);
    }
  }
  const count = groups.length + Object.keys(forms).filter((name) => result[name] !== undefined).length;
  check(count === 1, `an attention result has ${count} forms, expected 1`);
}

/** Return the number of units of a text with this number of tokens. */
function checkUnits(ids: unknown, numTokens: number | null): number | null {
  if (ids === undefined || (Array.isArray(ids) && ids.length === 0)) return numTokens;
  const isValid = Array.isArray(ids) && ids.every(Number.isInteger) && (numTokens ?? ids.length) === ids.length;
  check(isValid, `unit_ids is ${shown(ids)}, expected one integer for each of ${numTokens} tokens`);
  return ids.reduce((last: number, id: number) => Math.max(last, id), -1) + 1;
}

/** Return the number of units of an explanation. */
export function checkExplanation(value: unknown): number {
  checkObject(value, "an explanation");
  const { length } = checkedObjects(value.tokens, "tokens");
  const units = checkUnits(value.unit_ids, length) as number;
  checkedNumber(value.target_value, "target_value");
  for (const scores of checkedObjects(value.scores, "scores")) checkedTensor(scores.values, "values", [units], { gaps: true });
  if (value.head_contributions !== undefined) checkedTensor(value.head_contributions, "head_contributions", [null, null]);
  return units;
}

/** Check the comparison of a pair. */
export function checkComparison(result: Fields): void {
  const shape = [checkExplanation(result.a), checkExplanation(result.b)];
  checkedNumber(result.similarity, "similarity");
  if (result.matrix !== undefined) checkedTensor(result.matrix, "matrix", shape, { gaps: true });
}

/** Check scores of `count` documents or pairs, of which a response may have fewer. */
export function checkScores(response: Fields, count: number, numResults: number): void {
  const indices = new Set<number>();
  for (const result of checkedObjects(response.results, "results", numResults)) {
    indices.add(checkedIndex(result.index, "index", count));
    checkedNumber(result.score, "score");
    checkedNumber(result.logit, "logit");
    if (result.explanation !== undefined) checkExplanation(result.explanation);
  }
  check(indices.size === numResults, "results have an index twice");
  checkUsages(response, count);
}

/** Check logits and scores of each text for each label. */
export function checkClasses(response: Fields, count: number): void {
  const { labels } = response;
  check(Array.isArray(labels) && labels.every((label) => typeof label === "string"), `labels is ${shown(labels)}, expected a list of strings`);
  for (const name of ["logits", "scores"]) checkedTensor(response[name], name, [count, labels.length]);
  checkUsages(response, count);
}

/** Check the parts of a stream, which has each text once and in order. */
export class StreamCheck {
  private index = -1; // of the current text
  private numTokens = 0;
  private left = 0; // parts of the current text

  constructor(private readonly count: number) {}

  part(value: unknown): void {
    checkObject(value, "a part");
    const { input_index, text, attention } = value;
    if (text !== undefined) {
      this.checkEnd();
      this.index = checkedIndex(++this.index, "input_index", this.count);
      this.left = checkedIndex(value.num_attention_parts, "num_attention_parts");
      checkObject(text, "text");
      checkEncodedText(text);
      this.numTokens = (text.tokens as unknown[]).length;
    } else {
      checkObject(attention, "attention");
      check(this.left-- > 0, `text ${this.index} has more parts than announced`);
      checkAttention(attention, this.numTokens);
    }
    check(input_index === this.index, `input_index is ${shown(input_index)}, expected ${this.index}`);
  }

  end(): void {
    this.checkEnd();
    check(this.index === this.count - 1, `the stream has ${this.index + 1} texts, expected ${this.count}`);
  }

  private checkEnd(): void {
    check(this.left === 0, `${this.left} parts of text ${this.index} are missing`);
  }
}
