// Entry point of the page that a server hosts: a form with examples, and below it the results of the model.
import { LivePage, type Model } from "./live/page";
import { LabelsForm } from "./live/labels";
import { RankingForm } from "./live/ranking";
import { TextsForm } from "./live/texts";

const root = document.getElementById("attnlens") as HTMLElement;
document.body.classList.add("attnlens-page");
if (typeof DecompressionStream === "undefined") {
  root.textContent = "This browser does not support DecompressionStream. Use a version from 2023 or later.";
} else {
  const model = JSON.parse(root.dataset.model ?? "") as Model;
  const { labels, takes_pairs: takesPairs } = model;
  const isReranker = labels.length === 1 && takesPairs;
  const form = labels.length === 0 ? new TextsForm(model) : isReranker ? new RankingForm(model) : new LabelsForm(model);
  new LivePage(root, model, form);
}
