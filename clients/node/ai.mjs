// The `ai` package with its OpenAI-compatible provider against a live server.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, generateText, streamText, tool } from 'ai'
import { z } from 'zod'

const provider = createOpenAICompatible({
  name: 'dsv4', baseURL: `${process.env.DSV4_URL}/v1`, supportsStructuredOutputs: true,
})
const quiet = {
  model: provider('tiny'), temperature: 0, maxOutputTokens: 60, maxRetries: 0,
  providerOptions: { dsv4: { reasoningEffort: 'none' } },
}
const prompt = 'What is the capital of France?'

test('ai: text', async () => {
  const { text, usage } = await generateText({ ...quiet, prompt })
  assert.match(text, /Paris/)
  assert.ok(usage.outputTokens > 0)
})

test('ai: stream', async () => {
  let text = ''
  for await (const part of streamText({ ...quiet, prompt }).textStream) text += part
  assert.match(text, /Paris/)
})

test('ai: reasoning', async () => {
  const { reasoningText } = await generateText({
    ...quiet, prompt, maxOutputTokens: 20, providerOptions: {},
  })
  assert.ok(reasoningText.length > 0)
})

test('ai: object', async () => {
  const schema = z.object({ size: z.enum(['small', 'large']), old: z.boolean() })
  const { output } = await generateText({
    ...quiet, prompt, maxOutputTokens: 100, output: Output.object({ schema }),
  })
  schema.parse(output)
})

test('ai: a tool that must be called', async () => {
  const weather = tool({
    description: 'The weather',
    inputSchema: z.object({ unit: z.enum(['c', 'f']) }),
    execute: async ({ unit }) => `20 ${unit}`,
  })
  const { toolCalls, toolResults } = await generateText({
    ...quiet, prompt, maxOutputTokens: 100, tools: { weather }, toolChoice: 'required',
  })
  assert.ok(['c', 'f'].includes(toolCalls[0].input.unit))
  assert.match(toolResults[0].output, /^20 [cf]$/)
})
