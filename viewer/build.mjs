// Bundle src/ into attnlens_viewer/assets or DIR. Usage: node build.mjs [DIR]
import { build } from "esbuild";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const outdir = process.argv[2] ?? `${here}attnlens_viewer/assets`;
const options = {
  absWorkingDir: here,
  bundle: true,
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
  minify: true,
  target: ["es2022"],
  outdir,
};

// HTML pages load plain scripts, notebooks import an ES module.
await build({ ...options, entryPoints: { page: "src/page.ts", live: "src/live.ts", walkthrough: "src/walkthrough.ts" }, format: "iife" });
await build({ ...options, entryPoints: { widget: "src/widget.ts" }, format: "esm" });
await build({ ...options, entryPoints: { page: "src/style/page.css", walkthrough: "src/style/walkthrough.css" } });
