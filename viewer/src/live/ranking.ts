// The form of a reranker: a query and documents.
import { AttnlensClient } from "../../../client/typescript/src/client";
import type { AttnlensError } from "../../../client/typescript/src/errors";
import { Contributions } from "../tokens";
import { RankingView, type Compared, type Ranking } from "../views/ranking_view";
import type { FieldOptions } from "./field";
import { FieldError, type Connection, type Draw, type Form, type Model, type Texts } from "./page";

const MAX_SHOWN = 20; // documents with contributions
const NAMES = { prompt: "prompt", text: "query", second_text: "document", special: "special tokens", baseline: "baseline" };
const EXAMPLES: [string, Texts][] = [
  [
    "A question",
    {
      query: "Who wrote Emma?",
      documents: ["Emma was published in 1815.", "Charlotte Brontë wrote Jane Eyre.", "Jane Austen wrote Emma.", "It rained."].join("\n"),
    },
  ],
  [
    "A search",
    {
      query: "reset a forgotten password",
      documents: ["How to reset your router", "Recover access to your account", "I forgot my password. How do I set a new one?"].join("\n"),
    },
  ],
  [
    "Similar sentences",
    {
      query: "A man is playing a guitar.",
      documents: ["A man is eating an apple.", "Someone plays an instrument.", "A man is playing the guitar on a stage."].join("\n"),
    },
  ],
];

export class RankingForm implements Form {
  readonly button = "Rank";
  readonly examples = EXAMPLES;
  readonly lead: string;
  readonly fields: [string, FieldOptions][];

  constructor(private readonly model: Model) {
    this.lead = model.can_explain
      ? "See how this model ranks documents for a query, and what each word contributes to a score."
      : "See how this model ranks documents for a query. This server does not compute contributions.";
    const hint = `One per line. With the query, up to ${model.max_tokens} tokens: longer documents are truncated.`;
    this.fields = [
      ["query", { label: "Query", hint: "The query is never truncated." }],
      ["documents", { label: "Documents", hint, kind: "lines" }],
    ];
  }

  async compute(texts: Texts, connection: Connection, signal: AbortSignal): Promise<Draw> {
    const query = texts.query ?? "";
    const documents = linesOf(texts.documents);
    if (query.trim() === "") throw new FieldError("query", "the query is empty: enter a query");
    if (documents.length === 0) throw new FieldError("documents", "the documents are empty: enter at least one");
    const client = new AttnlensClient({ baseUrl: ".", ...connection });
    const explanation = this.model.can_explain ? { level: "tokens" as const } : undefined;
    const { results, usages, activation } = await client.score(query, documents, { top_n: MAX_SHOWN, explanation, signal });
    const ranked = results.map(({ index, score, logit, explanation }) => ({
      index,
      text: documents[index],
      score: score ?? NaN,
      logit: logit ?? NaN,
      tokensTotal: usages[index].truncated ? usages[index].num_tokens_total : null,
      contributions: explanation ? new Contributions(explanation, { text: query, second_text: documents[index] }, NAMES) : null,
    }));
    const ranking: Ranking = { model: this.model.name, query, documents: ranked, numDocuments: documents.length, activation };
    return (root, selected, store) => {
      const start = comparedOf(selected, ranked.length);
      const view = new RankingView(root, ranking, start, ({ first, second }) => store({ first: String(first), second: String(second) }));
      return { title: query, ready: Promise.resolve(), close: () => view.close() };
    };
  }

  locate(error: AttnlensError): { name: string; message: string } | null {
    const [violation] = error.violations;
    const [, name, index] = /^(query|documents)(?:\[(\d+)\])?$/.exec(violation?.field ?? "") ?? [];
    if (!name) return null;
    const subject = index === undefined ? `the ${name}` : `document ${Number(index) + 1}`;
    return { name, message: `${subject} ${violation.description}` };
  }
}

/** Return the lines of a text that are not blank. */
function linesOf(text = ""): string[] {
  return text.split("\n").map((line) => line.trim()).filter((line) => line !== "");
}

/** Return the selected ranks, or the first two. */
function comparedOf(parameters: URLSearchParams, count: number): Compared {
  const [first, second] = ["first", "second"].map((name) => Number(parameters.get(name) ?? NaN));
  const isRank = (value: number): boolean => Number.isInteger(value) && value >= 0 && value < count;
  return isRank(first) && isRank(second) && first !== second ? { first, second } : { first: 0, second: 1 };
}
