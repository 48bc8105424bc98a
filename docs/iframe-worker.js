// Browsers give no worker to a page that is read from a file. The search's worker, which is the only one, then runs in a
// hidden frame. Its script looks for the name IFrameWorker, and for one script in the frame.
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    const scope = (this.scope = frame.contentWindow)
    scope.document.open()
    scope.document.write("<body></body>")
    scope.document.close()
    const load = (source) =>
      new Promise((resolve) => {
        const script = scope.document.createElement("script")
        script.src = source
        script.onload = resolve
        scope.document.body.append(script)
      })
    scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
    scope.importScripts = (...sources) => sources.reduce((before, x) => before.then(() => load(x)), Promise.resolve())
    this.ready = load(url)
  }

  postMessage(data) {
    this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })))
  }
}

if (location.protocol === "file:") window.Worker = window.IFrameWorker
