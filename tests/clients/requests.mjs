// Sends the requests of a file with fetch, and prints the answers. Arguments: the kind of bodies, and the file.
import { readFileSync } from "node:fs";

const [kind, file] = process.argv.slice(2);
for (const line of readFileSync(file, "latin1").split("\n").filter(Boolean)) {
  const [method, url, type, text] = line.split(" ");
  const bytes = Buffer.from(text ?? "", "base64");
  const options = { method, headers: { "content-type": type } };
  if (method !== "GET") {
    options.body = kind === "chunked" ? new Blob([bytes]).stream() : bytes;
    options.duplex = "half";
  }
  const answer = await fetch(url, options);
  console.log(answer.status, Buffer.from(await answer.arrayBuffer()).toString("base64"));
}
