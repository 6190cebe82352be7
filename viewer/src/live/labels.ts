// The form of a classifier: a text, or a pair of texts that the model reads as one input.
import { AttnlensClient, type Input } from "../../../client/typescript/src/client";
import type { AttnlensError } from "../../../client/typescript/src/errors";
import { Contributions } from "../tokens";
import { LabelsView, type Classification, type SelectedLabels } from "../views/labels_view";
import type { FieldOptions } from "./field";
import { FieldError, messageOf, type Connection, type Draw, type Form, type Model, type Texts } from "./page";

const NAMES = { prompt: "prompt", text: "text", second_text: "second text", special: "special tokens", baseline: "baseline" };
const EXAMPLES: [string, Texts][] = [
  ["A description", { text: "Two children are playing in the garden." }],
  ["Advice", { text: "I think you should install the driver again, and then try it once more." }],
  ["A report", { text: "The government announced new taxes on Tuesday." }],
];

export class LabelsForm implements Form {
  readonly button = "Classify";
  readonly examples = EXAMPLES;
  readonly lead: string;
  readonly fields: [string, FieldOptions][];
  private isPair = false; // of the last request

  constructor(private readonly model: Model) {
    this.lead = model.can_explain
      ? "See the score of each label of this model for a text, and what each word contributes to it."
      : "See the score of each label of this model for a text. This server does not compute contributions.";
    this.fields = [["text", { label: "Text", hint: `Up to ${model.max_tokens} tokens.` }]];
    const hint = "Optional: for models that classify pairs of texts.";
    if (model.takes_pairs) this.fields.push(["second_text", { label: "Second text", hint }]);
  }

  async compute(texts: Texts, connection: Connection, signal: AbortSignal): Promise<Draw> {
    const { text, second_text: second } = texts;
    if (!text) throw new FieldError("text", "the text is empty: enter a text");
    this.isPair = second !== undefined;
    const client = new AttnlensClient({ baseUrl: ".", ...connection });
    const input: Input = second === undefined ? text : { text_pair: { first: text, second } };
    const { labels, logits, scores, activation } = await client.classify(input, { signal });
    const explain = async ({ label, ratherThan }: SelectedLabels, signal: AbortSignal): Promise<Contributions> => {
      const target = { label: { index: label }, rather_than: ratherThan === null ? undefined : { index: ratherThan } };
      const { results } = await client.explain(input, { label: target, signal });
      return new Contributions(results[0], { text, second_text: second ?? "" }, NAMES);
    };
    const result: Classification = {
      model: this.model.name,
      title: second === undefined ? text : `${text} / ${second}`,
      texts: second === undefined ? [["text", "text"]] : [["text", "first text"], ["second_text", "second text"]],
      labels,
      logits: Array.from(logits?.data ?? []),
      scores: Array.from(scores?.data ?? []),
      activation,
      explain: this.model.can_explain ? explain : null,
    };
    return (root, selected, store) => {
      const changed = ({ label, ratherThan }: SelectedLabels): void =>
        store({ label: String(label), rather_than: ratherThan === null ? "" : String(ratherThan) });
      const view = new LabelsView(root, result, labelsOf(selected, result.logits), changed, messageOf);
      return { title: result.title, ready: Promise.resolve(), close: () => view.close() };
    };
  }

  locate(error: AttnlensError): { name: string; message: string } | null {
    const [violation] = error.violations;
    if (!violation?.field.startsWith("inputs[0]")) return null;
    const isSecond = violation.field.endsWith(".second");
    const { num_tokens: numTokens, max_tokens: maxTokens } = error.metadata;
    const isLong = error.reason === "INPUT_TOO_LONG";
    const problem = isLong ? `has ${numTokens} tokens, but the limit is ${maxTokens}: shorten it` : violation.description;
    const subject = isSecond ? "the second text" : isLong && this.isPair ? "the pair of texts" : "the text";
    return { name: isSecond ? "second_text" : "text", message: `${subject} ${problem}` };
  }
}

/** Return the selected labels, or the one with the highest logit. */
function labelsOf(parameters: URLSearchParams, logits: number[]): SelectedLabels {
  const indexOf = (name: string): number | null => {
    const value = parameters.get(name) || null;
    const index = Number(value);
    return value !== null && Number.isInteger(index) && index >= 0 && index < logits.length ? index : null;
  };
  const label = indexOf("label") ?? logits.indexOf(Math.max(...logits));
  const ratherThan = indexOf("rather_than");
  return { label, ratherThan: ratherThan === label ? null : ratherThan };
}
