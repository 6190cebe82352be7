// Entry point of the page that shows attention step by step.
import { WalkthroughApp } from "./walkthrough/app";
import type { WalkthroughData } from "./walkthrough/data";

const textOf = (id: string): string => document.getElementById(id)?.textContent ?? "";
document.body.classList.add("attnlens-page");
const data = JSON.parse(textOf("attnlens-data")) as WalkthroughData;
const root = document.getElementById("attnlens") as HTMLElement;
new WalkthroughApp(root, data, (layer) => textOf(`attnlens-layer-${layer}`)).draw();
