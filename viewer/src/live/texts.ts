// The form of an embedding model: a text, and up to two others to compare it with.
import type { AttnlensError } from "../../../client/typescript/src/errors";
import { Transport } from "../../../client/typescript/src/transport";
import { App } from "../app";
import type { PageData } from "../data";
import { fromBase64 } from "../maps";
import type { State } from "../state";
import type { FieldOptions } from "./field";
import type { Connection, Draw, Form, Model, Texts } from "./page";

interface Reply {
  page: PageData;
  maps: string[]; // base64-encoded maps of each text and layer
}

const EXAMPLES: [string, Texts][] = [
  ["One sentence", { text: "The animal didn't cross the street because it was too tired." }],
  ["Two similar sentences", { text: "A man is playing a guitar.", other: "Someone plays an instrument." }],
  [
    "A query and two results",
    {
      text: "How do I reset my password?",
      other: "I forgot my login credentials.",
      rather_than: "How do I reset my router?",
    },
  ],
];

export class TextsForm implements Form {
  readonly button = "Show";
  readonly lead: string;
  readonly fields: [string, FieldOptions][];
  readonly examples: [string, Texts][];

  constructor({ num_layers: layers, num_heads: heads, max_tokens: maxTokens, can_explain: explains }: Model) {
    const attention = `what the ${layers * heads} attention heads of this model attend to.`;
    this.lead = explains
      ? `See what each word of a text contributes to its embedding, and ${attention}`
      : `See ${attention} This server does not compute contributions.`;
    this.fields = [
      ["text", { label: "Text", hint: `Up to ${maxTokens} tokens.` }],
      ["other", { label: "Compare with", hint: explains ? "Optional: which words make the two texts similar?" : "Optional." }],
    ];
    const hint = "Optional: why is the text closer to the second than to this one?";
    if (explains) this.fields.push(["rather_than", { label: "Rather than", hint }]);
    this.examples = EXAMPLES.filter(([, texts]) => explains || !texts.rather_than);
  }

  async compute(texts: Texts, connection: Connection, signal: AbortSignal): Promise<Draw> {
    const { page, maps } = (await new Transport("", connection).request("page", texts, signal)) as Reply;
    return (root, selected, store) => {
      const { layers } = page.texts[0];
      const source = { compressed: (text: number, layer: number) => fromBase64(maps[text * layers + layer]) };
      const changed = ({ layer, head }: State): void => store({ layer: String(layer), head: head === null ? "mean" : String(head) });
      const app = new App(root, page, source, { heading: "h2", start: headOf(selected), changed });
      return { title: page.title, ready: app.refresh(), close: () => app.close() };
    };
  }

  locate(error: AttnlensError): { name: string; message: string } | null {
    const { field: name } = error.body as { field?: string };
    return name === undefined ? null : { name, message: error.message };
  }
}

function headOf(parameters: URLSearchParams): Partial<State> {
  const [layer, head] = ["layer", "head"].map((name) => parameters.get(name));
  if (layer === null || head === null) return {};
  return { layer: Number(layer), head: head === "mean" ? null : Number(head) };
}
